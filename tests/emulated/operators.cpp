// PyTorch's CUDA operators on the emulated GPU: each runs as the CPU's operator on the same memory, when its turn in the
// stream comes. Results are allocated at the call, by shapes that the operator's meta kernel gives; operators without one
// wait for what is enqueued, as those do that give numbers to the host. Views and empty tensors are PyTorch's own.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <functional>

using Work = std::function<void()>;
using c10::IValue;
using Stack = torch::jit::Stack;

extern "C" {
void emulated_enqueue(void* stream, const Work& work);
bool emulated_is_capturing(void* stream);
bool emulated_is_pinned(const void* pointer);
unsigned long long emulated_graph_launches();
}

namespace {

std::vector<c10::RegistrationHandleRAII> registrations;

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Of the caching allocators, so that no error of the runtime is lost.
void synchronize() { c10::cuda::getCurrentCUDAStream().synchronize(); }

bool is_pinned(const at::Tensor& tensor) { return tensor.numel() && emulated_is_pinned(tensor.const_data_ptr()); }

at::Tensor keep_number(const at::Tensor& from, at::Tensor to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  return to;
}

// A CPU tensor of the same memory, which it does not keep.
at::Tensor on_host(const at::Tensor& tensor) {
  c10::InferenceMode off(false);
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// An argument on the CPU as the device will see it: pageable memory is read at the call.
at::Tensor as_read(const at::Tensor& tensor) {
  if (is_pinned(tensor)) return on_host(tensor);
  c10::InferenceMode off(false);
  return keep_number(tensor, tensor.detach().clone());
}

at::Tensor to_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return as_read(tensor);  // a number: meta kernels may look at it
  c10::InferenceMode off(false);
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// A value with its tensors replaced.
IValue replace(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& with) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(with(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? with(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(with(*tensor)) : tensor);
    return list;
  }
  return value;
}

IValue on_device(const IValue& value, c10::DeviceType type) {
  if (value.isDevice()) return c10::Device(type);
  return value.isGenerator() ? IValue() : value;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool is_attention(const std::string& name) {
  return name == "aten::_scaled_dot_product_flash_attention" || name == "aten::_scaled_dot_product_cudnn_attention" ||
         name == "aten::_scaled_dot_product_efficient_attention";
}

// What only GPUs have, by its definition: the output alone, since the rest is for gradients.
void attend(bool is_flash, Stack* stack) {
  Stack& given = *stack;
  std::optional<at::Tensor> bias;
  if (!is_flash && given[3].isTensor() && given[3].toTensor().defined()) bias = given[3].toTensor();
  std::optional<double> scale;
  if (given.back().isDouble()) scale = given.back().toDouble();
  bool is_causal = given[is_flash ? 4 : 6].toBool();
  auto out = at::_scaled_dot_product_attention_math(given[0].toTensor(), given[1].toTensor(), given[2].toTensor(), bias,
                                                    0.0, is_causal, std::nullopt, scale, true);
  given.assign(1, IValue(std::get<0>(out)));
}

void call(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::string& name = op.schema().name();
  Stack& given = *stack;
  if (is_attention(name)) {
    attend(name == "aten::_scaled_dot_product_flash_attention", stack);
  } else if (name == "aten::cudnn_convolution") {
    auto numbers = [&](size_t i) { return given[i].toIntVector(); };
    auto out = at::convolution(given[0].toTensor(), given[1].toTensor(), {}, numbers(3), numbers(2), numbers(4), false,
                               {0}, given[5].toInt());
    given.assign(1, IValue(out));
  } else if (name == "aten::histc" && !given[0].toTensor().is_floating_point()) {  // the CPU's takes no integers
    auto type = given[0].toTensor().scalar_type();
    given[0] = given[0].toTensor().to(at::kDouble);
    op.callBoxed(stack);
    given[0] = given[0].toTensor().to(type);
  } else {
    op.callBoxed(stack);
  }
}

// Work is done when somebody waits, maybe below a mode of Python: that is not meant for it.
struct Apart {
  c10::InferenceMode off{false};
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

void copy_into(const IValue& target, const IValue& result) {
  if (target.isTensor() && target.toTensor().defined()) target.toTensor().copy_(result.toTensor());
  if (!target.isTensorList()) return;
  auto targets = target.toTensorVector(), results = result.toTensorVector();
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(results[i]);
}

// The meta kernel's results; nothing if there is no meta kernel, or values decide.
std::optional<Stack> inferred(const c10::OperatorHandle& op, const std::vector<IValue>& given, std::vector<IValue>* metas) {
  Stack stack;
  for (const IValue& value : given) stack.push_back(replace(on_device(value, at::kMeta), to_meta));
  if (metas) *metas = stack;
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

// Give `out=` arguments their sizes.
void resize_out(const c10::OperatorHandle& op, const std::vector<IValue>& given) {
  std::vector<IValue> metas;
  const auto& arguments = op.schema().arguments();
  auto is_out = [&](size_t i) { return arguments[i].kwarg_only() && is_written(arguments[i]) && given[i].isTensor(); };
  bool any = false;
  for (size_t i = 0; i < given.size(); i++) any |= is_out(i);
  if (!any || !inferred(op, given, &metas)) return;
  for (size_t i = 0; i < given.size(); i++)
    if (is_out(i) && given[i].toTensor().sizes() != metas[i].toTensor().sizes())
      given[i].toTensor().resize_(metas[i].toTensor().sizes());
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  const std::string& name = schema.name();
  const bool is_copy = name == "aten::copy_";
  std::vector<IValue> given(stack->end() - arguments.size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  void* stream = current_stream();
  const bool capturing = emulated_is_capturing(stream);

  resize_out(op, given);
  bool waits = name == "aten::_local_scalar_dense", draws = false, makes = false;
  auto operands = std::make_shared<std::vector<IValue>>();
  for (size_t i = 0; i < given.size(); i++) {
    draws |= arguments[i].name() == "generator";
    operands->push_back(replace(on_device(given[i], at::kCPU), [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) return on_host(tensor);
      if (is_written(arguments[i])) {  // a copy to the host
        waits |= !(is_copy && given[2].toBool() && is_pinned(tensor));
        return on_host(tensor);
      }
      TORCH_CHECK(!(capturing && is_copy) || is_pinned(tensor), "a copy from pageable memory cannot be captured");
      return as_read(tensor);
    }));
  }
  for (const auto& result : returns) {
    auto kind = result.type()->kind();
    makes |= !is_written(result);
    waits |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType && !is_attention(name);
  }

  Stack found;
  if (!waits && makes) {
    auto shapes = inferred(op, given, nullptr);
    waits = !shapes;
    if (shapes) found = *shapes;
  }
  if (waits) {
    c10::cuda::warn_or_error_on_sync();
    TORCH_CHECK(!capturing, name, " waits for the device, and cannot be captured");
    synchronize();
    found = *operands;
    call(op, &found);
  }

  auto allocate = [&](const at::Tensor& like) {
    auto options = at::TensorOptions().dtype(like.dtype()).device(at::kCUDA, c10::cuda::current_device());
    auto result = at::empty_strided(like.sizes(), like.strides(), options);
    if (waits) on_host(result).copy_(like);
    return result;
  };
  auto targets = std::make_shared<std::vector<IValue>>();
  for (size_t i = 0; i < returns.size(); i++) {
    if (!is_written(returns[i])) {
      stack->push_back(replace(found[i], allocate));
      targets->push_back(replace(stack->back(), on_host));
      continue;
    }
    for (size_t j = 0; j < given.size(); j++)
      if (is_written(arguments[j]) && *arguments[j].alias_info() == *returns[i].alias_info()) {
        stack->push_back(given[j]);
        break;
      }
    targets->push_back(IValue());
  }
  if (waits) return;
  const bool at_once = draws && !capturing;  // in the order in which the host draws
  if (at_once) synchronize();
  c10::OperatorHandle handle = op;
  emulated_enqueue(stream, [handle, operands, targets] {
    Apart apart;
    Stack results = *operands;
    call(handle, &results);
    for (size_t i = 0; i < targets->size() && i < results.size(); i++) copy_into((*targets)[i], results[i]);
  });
  if (at_once) synchronize();
  for (const IValue& value : given) {
    if (!is_copy || !value.isTensor() || !value.toTensor().is_cpu() || !is_pinned(value.toTensor())) continue;
    const auto& memory = value.toTensor().storage().data_ptr();  // not to be used again before the copy
    auto queue = c10::cuda::getCurrentCUDAStream().unwrap();
    at::getHostAllocator(at::kCUDA)->record_event(memory.get(), memory.get_context(), queue);
  }
}

bool is_pytorchs(const c10::OperatorHandle& op) {
  static const std::vector<std::string> prefixes{"empty",       "set_",       "resize_", "as_strided",       "_reshape_alias",
                                                 "view",        "is_pinned",  "unfold",  "_fused_sdp_choice", "record_stream",
                                                 "_pin_memory", "_to_copy",   "_nested", "_efficientzero",   "is_set_to"};
  for (const auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;  // a view
  std::string name = op.schema().name().substr(strlen("aten::"));
  return std::any_of(prefixes.begin(), prefixes.end(), [&](auto& prefix) { return name.rfind(prefix, 0) == 0; });
}

void install() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) || !op || !op->hasSchema() || is_pytorchs(*op)) continue;
    if (name.name != "aten::copy_" && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunction<&run>();
    registrations.push_back(
        dispatcher.registerImpl(name, c10::DispatchKey::CUDA, kernel, std::nullopt, nullptr, "emulated GPU"));
  }
}

void enqueue(py::object work) {
  auto held = std::shared_ptr<py::object>(new py::object(std::move(work)), [](py::object* object) {
    py::gil_scoped_acquire python;
    delete object;
  });
  py::gil_scoped_release others;  // another thread may hold the runtime, and run Python there
  emulated_enqueue(current_stream(), [held] {
    py::gil_scoped_acquire python;
    Apart apart;
    (*held)();
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install, "Let the operators of CUDA tensors run on the emulated GPU.");
  module.def("enqueue", &enqueue, "Call a function when its turn in the current stream comes.");
  module.def("on_host", &on_host, "A CPU tensor of the same memory, which it does not keep.");
  module.def("graph_launches", &emulated_graph_launches, "How many CUDA graphs were launched.");
}
