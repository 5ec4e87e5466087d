"""What would make a site pageable: one sentence for each kind of reason why it is not."""

from __future__ import annotations

__all__ = ["ADVICE", "OTHERWISE", "advise"]

_PLAIN = (
    "hand K and V from the cache to scaled_dot_product_attention with nothing between them but head repetition, "
    "transposition and conversion"
)
_BY_HAND = "write the attention as one scaled_dot_product_attention (transformers: attn_implementation='sdpa')"

ADVICE: tuple[tuple[str, str], ...] = (
    ("gradients are needed", "call the model under torch.no_grad(), or model.requires_grad_(False)"),
    ("dropout_p", "model.eval(), or dropout_p=0"),
    ("batch size", "repeat the queries to the batch of the cache (or the cache, by repeat_interleave) before the step"),
    ("of its operands are not [", "bring K, V and the queries to [B, H, S, D] before the attention"),
    ("not all 4-D", "bring K, V and the queries to [B, H, S, D] before the attention"),
    (
        "it is a dense input of the graph",
        "return K and V from the call, and pass them to the next one, as use_cache=True does; if they are, let no "
        ".item() or print in the model part the cache from its attention",
    ),
    (
        "does not come from a cache",
        "return K and V from the call, and pass them to the next one, as use_cache=True does",
    ),
    ("not kept by the program", "return K and V from the call, and pass them to the next one, as use_cache=True does"),
    ("is scaled between cache", "scale the queries, or pass scale= to the attention, and leave the cache as it is"),
    ("between cache and attention is not understood", _PLAIN),
    (
        "takes a part of the cache",
        "let the attention read the whole cache, and hide the rest by a mask or crop the cache",
    ),
    ("tokens of their caches", "let the attention read as many keys as values"),
    ("adds more than one dimension", _PLAIN),
    ("adds dimensions by expand", _PLAIN),
    ("broadcasts the cache", "broadcast heads only: repeat the batch by repeat_interleave on the cache"),
    ("reshapes the cache", _PLAIN),
    ("repeats something other than heads", _PLAIN),
    ("repeats heads a number of times", "repeat the heads a number of times that is a constant of the graph"),
    ("repeat all heads in turn", "use scaled_dot_product_attention, or repeat_interleave for the heads"),
    ("repeat heads in different orders", "repeat the heads of keys and values in the same way"),
    ("has no heads", "keep a dimension of heads, of size 1 if there is one"),
    ("converts the cache", "keep the cache in the dtype and on the device that the attention reads"),
    ("do not match", "let the number of query heads be a multiple of the number of key heads"),
    ("heads, its keys for", _BY_HAND),
    ("and V have", "give K and V the same number of heads"),
    ("one of K and V is dense", "keep K and V in the same way: both returned, or both passed in"),
    ("belong to different caches", "extend K and V of one layer in one call, by the same number of tokens"),
    ("to its K or V in place", "make a new tensor in place of the in-place write, or write before K and V are kept"),
    ("to its operands in place", "make a new tensor in place of the in-place write"),
    ("writes to a paged cache in place", "write at consecutive positions, as index_copy_(2, positions, new) does"),
    (
        "reads it whole",
        "avoid the operation on the whole cache in the step, or do it on the new tokens before they join",
    ),
    ("the graph has no tensor inputs", "nothing to do, unless this graph was to hold a cache"),
    ("no KV cache", "return K and V of every layer from the call, grown by torch.cat or written into a static buffer"),
    (
        "a static cache could not become paged",
        "let nothing else share the buffer's memory, and need no gradients of it",
    ),
    ("no argument of the graph has size", "pass the cache's tensors as arguments of the compiled call"),
    ("batch and heads", _BY_HAND),
    ("adds to scores", _BY_HAND),
    ("bounds scores", _BY_HAND),
    ("masked scores", _BY_HAND),
    ("the scores", _BY_HAND),
    ("its scores", _BY_HAND),
    ("its queries", _BY_HAND),
    ("sink", _BY_HAND),
    ("something that is no", _BY_HAND),
)
"""(fragment of a reason, advice): the first fragment that occurs in a reason decides."""

OTHERWISE = _PLAIN


def advise(reason: str) -> str:
    """What would remove `reason`; "" if there is none."""
    if not reason:
        return ""
    return next((advice for fragment, advice in ADVICE if fragment in reason), OTHERWISE)
