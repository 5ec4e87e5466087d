// A CUDA runtime without a GPU, for tests: PyTorch's CUDA build runs on it, with its allocator, streams, events and
// graphs. Memory of the "device" is memory of the host, full of NaN until it is written. Work is queued, as on a GPU,
// and done as late as the rules of CUDA allow: when somebody waits for it. What a program forgets to wait for is then
// missing, every time. Operations that CUDA forbids while a stream is captured fail as there, and end the capture.
//
// Kernels are host functions, given to `emulated_enqueue`: launches of device code fail.
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using Work = std::function<void()>;
using Lock = std::unique_lock<std::mutex>;

struct Stream;

struct Graph {
  std::vector<Work> nodes;
  std::set<Stream*> forked;                // streams that joined the capture and were not yet waited for
  std::map<Stream*, size_t> last_node_of;  // how many nodes there were after a stream's latest
  bool invalid = false;
  unsigned long long id = 0;
};

struct Stream {
  std::deque<Work> queue;
  unsigned long long enqueued = 0, done = 0;
  std::thread::id worker;  // who does the latest of its work just now, if anybody
  Graph* graph = nullptr;  // that it is captured into
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  int priority = 0;
};

struct Event {
  Stream* stream = nullptr;  // of the latest record, and how much of the stream's work is before it
  unsigned long long ticket = 0;
  double milliseconds = 0;
  Graph* graph = nullptr;  // of a record in a capture
  Stream* captured_on = nullptr;
  size_t node = 0;
};

struct Executable {
  std::shared_ptr<std::vector<Work>> nodes;
};

const size_t MEMORY = size_t(6) << 30;

std::mutex mutex;  // of all that follows
std::condition_variable progress;
Stream default_stream;
std::set<Stream*> streams{&default_stream};
std::map<char*, size_t> device_memory, pinned_memory;
size_t allocated = 0;
int global_captures = 0;
unsigned long long graph_launches = 0, captures = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0, captures_of_thread = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Initialised before main, when device code registers itself.
std::unordered_map<const void*, std::string>& kernel_names() {
  static std::unordered_map<const void*, std::string> names;
  return names;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream* stream_of(cudaStream_t handle) {
  bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? &default_stream : reinterpret_cast<Stream*>(handle);
}

void enqueue(Stream* stream, const Work& work) {
  if (Graph* graph = stream->graph) {
    graph->nodes.push_back(work);
    graph->last_node_of[stream] = graph->nodes.size();
    return;
  }
  stream->queue.push_back(work);
  stream->enqueued++;
}

// Work is done by whoever waits for it, without the lock: it may need Python's, which others may hold who wait for ours.
void finish(Lock& lock, Stream* stream, unsigned long long ticket) {
  while (stream->done < ticket) {
    if (stream->worker == std::this_thread::get_id()) return;  // work that waits for itself
    if (stream->worker != std::thread::id()) {
      progress.wait(lock);
      continue;
    }
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->worker = std::this_thread::get_id();
    lock.unlock();
    std::exception_ptr raised;
    try {
      work();
    } catch (...) {
      raised = std::current_exception();
    }
    work = nullptr;
    lock.lock();
    stream->worker = std::thread::id();
    stream->done++;
    progress.notify_all();
    if (raised) std::rethrow_exception(raised);
  }
}

void finish_all(Lock& lock) {
  const std::vector<Stream*> all(streams.begin(), streams.end());
  for (Stream* stream : all) finish(lock, stream, stream->enqueued);
}

// Whether this thread may not do now what waits for the device, or takes memory.
bool is_forbidden() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  return captures_of_thread > 0 || (thread_mode == cudaStreamCaptureModeGlobal && global_captures > 0);
}

cudaError_t invalidate(cudaError_t error) {
  for (Stream* stream : streams)
    if (stream->graph) stream->graph->invalid = true;
  return fail(error);
}

bool is_within(const std::map<char*, size_t>& memory, const void* pointer) {
  auto at = memory.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  return at != memory.begin() && (--at, static_cast<const char*>(pointer) < at->first + at->second);
}

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

cudaError_t device_code(const void* function) {
  auto found = kernel_names().find(function);
  fprintf(stderr, "emulated GPU: device code cannot run: %s\n", found == kernel_names().end() ? "?" : found->second.c_str());
  return fail(cudaErrorLaunchFailure);
}

}  // namespace

#define LOCK Lock lock(mutex)
#define REFUSE_IN_CAPTURE \
  if (is_forbidden()) return invalidate(cudaErrorStreamCaptureUnsupported)

extern "C" {

// For the operators and the tests.

void emulated_enqueue(void* handle, const Work& work) {
  LOCK;
  enqueue(stream_of(static_cast<cudaStream_t>(handle)), work);
}

bool emulated_is_capturing(void* handle) { return stream_of(static_cast<cudaStream_t>(handle))->graph != nullptr; }
bool emulated_is_pinned(const void* pointer) {
  LOCK;
  return is_within(pinned_memory, pointer);
}
unsigned long long emulated_graph_launches() { return graph_launches; }

// Devices.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:0%d:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* facts, int device) {
  memset(facts, 0, sizeof *facts);  // the rest as of an H200
  strcpy(facts->name, "Emulated GPU");
  facts->totalGlobalMem = MEMORY;
  facts->sharedMemPerBlock = 48 << 10;
  facts->sharedMemPerBlockOptin = 227 << 10;
  facts->sharedMemPerMultiprocessor = 228 << 10;
  facts->regsPerBlock = facts->regsPerMultiprocessor = 65536;
  facts->warpSize = 32;
  facts->maxThreadsPerBlock = facts->maxThreadsDim[0] = facts->maxThreadsDim[1] = 1024;
  facts->maxThreadsDim[2] = 64;
  facts->maxGridSize[0] = 2147483647;
  facts->maxGridSize[1] = facts->maxGridSize[2] = 65535;
  facts->maxThreadsPerMultiProcessor = 2048;
  facts->major = 9;
  facts->multiProcessorCount = 132;
  facts->l2CacheSize = 60 << 20;
  facts->pciBusID = device + 1;
  facts->unifiedAddressing = facts->concurrentKernels = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known{{cudaDevAttrMaxThreadsPerBlock, 1024},
                                        {cudaDevAttrWarpSize, 32},
                                        {cudaDevAttrMultiProcessorCount, 132},
                                        {cudaDevAttrComputeCapabilityMajor, 9},
                                        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
                                        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  LOCK;
  REFUSE_IN_CAPTURE;
  finish_all(lock);
  return cudaSuccess;
}

// Errors.

const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    default: snprintf(text, sizeof text, "error %d of the emulated GPU", static_cast<int>(error)); return text;
  }
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

// Memory.

cudaError_t cudaMalloc(void** pointer, size_t size) {
  LOCK;
  REFUSE_IN_CAPTURE;
  *pointer = nullptr;
  if (allocated + size > MEMORY || posix_memalign(pointer, 2 << 20, size ? size : 1)) return fail(cudaErrorMemoryAllocation);
  memset(*pointer, 0xFF, size);
  allocated += size;
  device_memory[static_cast<char*>(*pointer)] = size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  LOCK;
  if (!pointer) return cudaSuccess;
  REFUSE_IN_CAPTURE;
  finish_all(lock);
  auto found = device_memory.find(static_cast<char*>(pointer));
  if (found == device_memory.end()) return fail(cudaErrorInvalidValue);
  allocated -= found->second;
  device_memory.erase(found);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  LOCK;
  REFUSE_IN_CAPTURE;
  if (posix_memalign(pointer, 4096, size ? size : 1)) return fail(cudaErrorMemoryAllocation);
  pinned_memory[static_cast<char*>(*pointer)] = size;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  LOCK;
  finish_all(lock);
  pinned_memory.erase(static_cast<char*>(pointer));
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  LOCK;
  pinned_memory[static_cast<char*>(pointer)] = size;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  LOCK;
  pinned_memory.erase(static_cast<char*>(pointer));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  LOCK;
  *free_bytes = MEMORY - allocated;
  *total = MEMORY;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* facts, const void* pointer) {
  LOCK;
  memset(facts, 0, sizeof *facts);
  bool on_device = is_within(device_memory, pointer), pinned = is_within(pinned_memory, pointer);
  facts->type = on_device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (on_device || pinned) facts->devicePointer = const_cast<void*>(pointer);
  if (pinned) facts->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// Copies: pageable memory is read at the call, and is written to before it returns; pinned memory when its turn comes.

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t handle) {
  LOCK;
  Stream* stream = stream_of(handle);
  if (!is_within(device_memory, from) && !is_within(pinned_memory, from)) {
    auto read = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    enqueue(stream, [=] { memcpy(to, read->data(), size); });
    return cudaSuccess;
  }
  bool waits = !is_within(device_memory, to) && !is_within(pinned_memory, to);
  if (waits && (stream->graph || is_forbidden())) return invalidate(cudaErrorStreamCaptureUnsupported);
  enqueue(stream, [=] { memmove(to, from, size); });
  if (waits) finish(lock, stream, stream->enqueued);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  LOCK;
  REFUSE_IN_CAPTURE;
  finish(lock, &default_stream, default_stream.enqueued);
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  emulated_enqueue(stream, [=] { memset(to, value, size); });
  return cudaSuccess;
}

// Streams and events.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  LOCK;
  auto* stream = new Stream;
  stream->priority = priority;
  streams.insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  LOCK;
  finish(lock, stream_of(handle), stream_of(handle)->enqueued);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  LOCK;
  if (stream_of(handle)->graph) return invalidate(cudaErrorStreamCaptureUnsupported);
  return stream_of(handle)->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  LOCK;
  Stream* stream = stream_of(handle);
  if (stream->graph) return invalidate(cudaErrorStreamCaptureUnsupported);
  REFUSE_IN_CAPTURE;
  finish(lock, stream, stream->enqueued);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // queued work may still refer to it
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  LOCK;
  auto* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(on);
  event->graph = stream->graph;
  if (event->graph) {
    event->stream = nullptr;
    event->captured_on = stream;
    event->node = stream->graph->nodes.size();
    return cudaSuccess;
  }
  enqueue(stream, [event] { event->milliseconds = now(); });
  event->stream = stream;
  event->ticket = stream->enqueued;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  LOCK;
  auto* event = reinterpret_cast<Event*>(handle);
  if (event->graph) return invalidate(cudaErrorCapturedEvent);
  REFUSE_IN_CAPTURE;
  return !event->stream || event->stream->done >= event->ticket ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  LOCK;
  auto* event = reinterpret_cast<Event*>(handle);
  if (event->graph) return invalidate(cudaErrorCapturedEvent);
  REFUSE_IN_CAPTURE;
  if (event->stream) finish(lock, event->stream, event->ticket);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = reinterpret_cast<Event*>(to)->milliseconds - reinterpret_cast<Event*>(from)->milliseconds;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t what, unsigned) {
  LOCK;
  Stream* stream = stream_of(handle);
  auto* event = reinterpret_cast<Event*>(what);
  if (Graph* graph = event->graph) {
    if (stream == &default_stream) return invalidate(cudaErrorStreamCaptureImplicit);
    if (stream->graph && stream->graph != graph) return invalidate(cudaErrorStreamCaptureIsolation);
    if (!stream->graph) {
      stream->graph = graph;
      graph->forked.insert(stream);
    } else if (auto last = graph->last_node_of.find(event->captured_on);
               last == graph->last_node_of.end() || last->second <= event->node) {
      graph->forked.erase(event->captured_on);
    }
    return cudaSuccess;
  }
  Stream* other = event->stream;
  if (!other) return cudaSuccess;
  unsigned long long ticket = event->ticket;
  if (stream->graph) return other->done < ticket ? invalidate(cudaErrorStreamCaptureIsolation) : cudaSuccess;
  enqueue(stream, [=] {
    LOCK;
    finish(lock, other, ticket);
  });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  emulated_enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}

// Captures and graphs.

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  LOCK;
  Stream* stream = stream_of(handle);
  if (stream == &default_stream || stream->graph) return fail(cudaErrorStreamCaptureUnsupported);
  stream->graph = new Graph;
  stream->graph->id = ++captures;
  stream->mode = mode;
  captures_of_thread += mode != cudaStreamCaptureModeRelaxed;
  global_captures += mode == cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  LOCK;
  Stream* stream = stream_of(handle);
  Graph* graph = stream->graph;
  *out = nullptr;
  if (!graph) return fail(cudaErrorIllegalState);
  captures_of_thread -= stream->mode != cudaStreamCaptureModeRelaxed;
  global_captures -= stream->mode == cudaStreamCaptureModeGlobal;
  for (Stream* other : streams)
    if (other->graph == graph) other->graph = nullptr;
  if (graph->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (!graph->forked.empty()) return fail(cudaErrorStreamCaptureUnjoined);
  *out = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* out, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  LOCK;
  Graph* graph = stream_of(handle)->graph;
  *status = !graph           ? cudaStreamCaptureStatusNone
            : graph->invalid ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
  if (id) *id = graph ? graph->id : 0;
  if (out) *out = reinterpret_cast<cudaGraph_t>(graph);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }  // events may still refer to it
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  auto nodes = std::make_shared<std::vector<Work>>(reinterpret_cast<Graph*>(graph)->nodes);
  *out = reinterpret_cast<cudaGraphExec_t>(new Executable{nodes});
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  delete reinterpret_cast<Executable*>(handle);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  LOCK;
  graph_launches++;
  auto nodes = reinterpret_cast<Executable*>(handle)->nodes;
  enqueue(stream_of(stream), [nodes] {
    for (const Work& work : *nodes) work();
  });
  return cudaSuccess;
}

// Device code registers itself, but never runs.

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernel_names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* facts, const void*) {
  memset(facts, 0, sizeof *facts);
  facts->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return device_code(function); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return device_code(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return device_code(function); }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return fail(cudaErrorSymbolNotFound);
}

}  // extern "C"
