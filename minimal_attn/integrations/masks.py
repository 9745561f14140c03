"""Masks for transformers, made once per forward pass.

transformers describes a mask by a function of the indices of a row and a key, and by the padding of the batch.
make_mask recognizes causal masks, sliding windows and packed sequences, and returns a Mask of them: kernels skip what
these hide. Any other function becomes a dense mask of bool or, if that is asked for, a BlockMask.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ..block_mask import BlockMask, create_block_mask
from ..checks import NO_WINDOW

HINT = 'This model reads or changes its mask, or adds it to scores itself: use attn_implementation="eager" for it.'


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a row sees, without a dense tensor. Only attend of transformers.py reads it: all else raises an error.
    A layer must have q_length rows and kv_length keys, but a mask that hides nothing fits any number of keys."""

    q_length: int
    kv_length: int
    causal: bool  # row i sees the keys j <= i + num_keys - q_length, or by the lengths of its sample
    window: tuple[int, int]  # (left, right), as in flash_attention
    num_keys: int  # only the first of the keys count; a static cache has room for more
    keys: Tensor | None = None  # bool (B, num_keys), True where a key is no padding
    seqused_q: Tensor | None = None  # int32 (B,), the lengths of each sample
    seqused_k: Tensor | None = None
    cu_seqlens: Tensor | None = None  # int32 (N + 1,), where the sequences of the flattened batch begin
    # The model has got an attention_mask, which may be all ones: as for eager attention, position_ids then separate no
    # sequences.
    is_padded: bool = False
    block_mask: BlockMask | None = None  # ours, or torch's; then there are no other tensors

    ndim = 4  # generate() asks for it, and calls contiguous()

    @property
    def shape(self):
        """Parts of a model that get the mask of another part ask for it. make_mask then returns this mask."""
        return torch.Size((1, 1, self.q_length, self.kv_length))

    @property
    def hides_nothing(self):
        return (not self.causal and self.window == NO_WINDOW and self.num_keys == self.kv_length
                and self.keys is self.seqused_k is self.cu_seqlens is self.block_mask is None)

    def contiguous(self):
        return self

    def to(self, device=None, dtype=None, non_blocking=False):
        """This mask with its tensors on another device, for layers that are spread over several."""
        if dtype is not None or isinstance(device, torch.dtype):
            raise NotImplementedError(f"a mask of minimal_attn has no dtype. {HINT}")
        moved = {name: x.to(device=device, non_blocking=non_blocking) for name, x in vars(self).items()
                 if isinstance(x, Tensor)}
        return dataclasses.replace(self, **moved, block_mask=self.block_mask and self.block_mask.to(device))

    def __getattr__(self, name):
        raise AttributeError(f"a mask of minimal_attn has no {name}. {HINT}")

    def __eq__(self, other):
        if other is not None and not isinstance(other, Mask):
            raise NotImplementedError(f"a mask of minimal_attn has no numbers to compare. {HINT}")
        return other is not None and all(x is y or not isinstance(x, Tensor) and x == y
                                         for x, y in zip(vars(self).values(), vars(other).values()))

    def __getitem__(self, index):
        raise NotImplementedError(f"a mask of minimal_attn has no elements. {HINT}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function.__name__} cannot take a mask of minimal_attn. {HINT}")


class Pattern(NamedTuple):
    """The meaning of a mask function of transformers."""

    causal: bool
    window: tuple[int, int] = NO_WINDOW
    sequence: Tensor | None = None  # int (B, S): the number of the sequence of each token, ascending in a sample
    in_sequence: bool = False  # it compares positions in sequences, but does not keep these apart


def pattern_of(mask_function) -> Pattern | None:
    """The Pattern of a mask function of transformers, or None if it is another one or cannot be told."""
    if mask_function is causal_mask_function:
        return Pattern(True)
    if mask_function is bidirectional_mask_function:
        return Pattern(False)
    code = getattr(mask_function, "__code__", None)
    if torch.compiler.is_compiling() or code not in _CODES:  # Dynamo reads no closures
        return None
    variable, pattern_from = _CODES[code]
    return pattern_from(mask_function.__closure__[code.co_freevars.index(variable)].cell_contents)


def _pattern_of_all(mask_functions):
    patterns = [pattern_of(function) for function in mask_functions]
    if None in patterns or sum(x.sequence is not None for x in patterns) > 1:
        return None
    sequence = next((x.sequence for x in patterns if x.sequence is not None), None)
    left, right = (min((x.window[side] for x in patterns if x.window[side] >= 0), default=-1) for side in (0, 1))
    # Positions ascend by 1 within a sequence, so that they count as indices do.
    in_sequence = sequence is None and any(x.in_sequence for x in patterns)
    return Pattern(any(x.causal for x in patterns), (left, right), sequence, in_sequence)


def _pattern_in_sequence(mask_function):
    pattern = pattern_of(mask_function)
    return pattern and pattern._replace(in_sequence=True)


def _recognized():
    """Patterns of transformers' closures, by their codes: {code: (a variable, its value -> Pattern)}. A function whose
    mask differs from its pattern is left out, and its masks become dense."""
    i, j = torch.arange(6, device="cpu")[:, None], torch.arange(6, device="cpu")
    sequence, positions = (torch.tensor([x], device="cpu") for x in ([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0]))
    both = masking_utils.sliding_window_bidirectional_overlay(2)
    closures = [  # and what they show
        ("mask_functions", _pattern_of_all, masking_utils.and_masks(causal_mask_function, both),
         (j <= i) & (i - j <= 2)),
        ("sliding_window", lambda value: Pattern(False, (value - 1, -1)), masking_utils.sliding_window_overlay(3),
         i - 3 < j),
        ("sliding_window", lambda value: Pattern(False, (value, value)), both, (i - j).abs() <= 2),
        ("packed_sequence_mask", lambda value: Pattern(False, sequence=value),
         masking_utils.packed_sequence_mask_function(sequence), sequence[0, i] == sequence[0, j])]
    if remap := getattr(masking_utils, "remap_positions_for_packed_sequence", None):  # newer than transformers 5.17
        closures.append(("mask_function", _pattern_in_sequence, remap(causal_mask_function, positions),
                         positions[0, j] <= positions[0, i]))
    return {function.__code__: (variable, pattern_from) for variable, pattern_from, function, shown in closures
            if variable in function.__code__.co_freevars and function(0, 0, i, j).equal(shown)}


_CODES = _recognized()


def _models(base=PreTrainedModel):
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


@functools.cache
def _attends_itself(config_class) -> bool:
    """Whether transformers' models of this config compute their attention themselves. transformers itself asks only in
    set_attn_implementation. Models from elsewhere are not judged: if they read a Mask, that raises an error."""
    for base in config_class.__mro__:
        if found := [model._can_set_attn_implementation() for model in _models()
                     if model.config_class is base and model.__module__.startswith("transformers.")]:
            return not any(found)
    return False


@torch.compiler.assume_constant_result  # around the cache, of which Dynamo would warn
def attends_itself(config_class) -> bool:
    return _attends_itself(config_class)


def make_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
              attention_mask=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=True, use_vmap=False,
              device="cpu", config=None, block_masks=False, **unused):
    """The mask function of transformers' AttentionMaskInterface, with its arguments: a Mask, or a bool tensor (B, 1,
    q_length, kv_length). With block_masks, such a tensor of more than one row becomes a BlockMask in a Mask, where the
    host can read. NotImplementedError for a config of models that compute their attention themselves.

    mask_function is one of indices in the sequence, where q_offset and kv_offset are those of the first row and key.
    attention_mask is None, bool (B, keys so far), True where a token is valid, or a Mask, which is returned.
    """
    if config is not None and attends_itself(type(config)):
        raise NotImplementedError(f"models of {type(config).__name__} do not call minimal_attn, but compute their "
                                  'attention themselves: use attn_implementation="eager" for them')
    if isinstance(attention_mask, Mask):
        return attention_mask
    # For a cache of fixed size, a compiled step of one token takes tensors of fixed sizes and reads none.
    is_fixed = q_length == 1 and not allow_is_causal_skip and isinstance(q_offset, Tensor)
    pattern, mask = pattern_of(mask_function), None
    if pattern is not None and pattern.sequence is not None:
        # transformers looks for packed sequences where there is neither padding nor a cache.
        has_cache = isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor) or q_offset != kv_offset
        if can_read(pattern.sequence) and attention_mask is None and q_length == kv_length and not has_cache:
            return Mask(q_length, kv_length, pattern.causal, pattern.window, kv_length,
                        cu_seqlens=_cu_seqlens(pattern.sequence.diff() != 0))
    elif pattern is not None and not pattern.in_sequence and (
            allow_is_causal_skip or is_fixed if pattern.causal else allow_is_bidirectional_skip):
        mask = _without_tensor(pattern, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, is_fixed,
                               device)
    if mask is None and block_masks and q_length > 1 and can_read(torch.empty(0, device=device)):
        mask = Mask(q_length, kv_length, False, NO_WINDOW, kv_length, block_mask=_block_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device))
    return mask if mask is not None else sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, allow_is_causal_skip=False,
        use_vmap=use_vmap, device=device)


def _block_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device):
    """The BlockMask of mask_function and of the padding in attention_mask. Arguments are as of make_mask."""
    if attention_mask is not None:  # of all keys from the first on
        attention_mask = pad(attention_mask, (0, int(kv_offset) + kv_length - attention_mask.shape[1]))

    def mask_mod(b, h, q_idx, kv_idx):
        key = kv_idx + kv_offset
        seen = mask_function(b, h, q_idx + q_offset, key)
        return seen if attention_mask is None else seen & attention_mask[b, key]

    return create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device)


def _cu_seqlens(is_first):
    """int32 (N + 1,): where the sequences of the flattened batch begin, with samples (B, S) that begin new ones and
    where is_first (B, S - 1) is True of a later token. The host waits for their number."""
    is_first = pad(is_first, (1, 0), value=True)
    return pad(is_first.flatten().nonzero().squeeze(1).int(), (0, 1), value=is_first.numel())


def can_read(x) -> bool:
    """Whether the host may read x: nothing traces, x has values of its own, and no CUDA graph is captured. A mode that
    only watches, such as a profiler, does not count: it must not change what a mask means."""
    return not (is_tracing(x) or x.is_meta or get_proxy_mode() is not None
                or torch._C._functorch.is_functorch_wrapped_tensor(x))


_FOUND = WeakTensorKeyDictionary()  # {position_ids: (their version, batch_size, what cu_seqlens_of found)}


def cu_seqlens_of(position_ids, batch_size) -> Tensor | None:
    """_cu_seqlens of sequences that begin where position_ids (B or 1, S) do not ascend, or None if all ascend.

    With a cache, transformers gives positions to each layer, and none to make_mask. The host waits for the first layer
    alone: the others of a forward pass find the result by the same tensor. position_ids must be readable.
    """
    version = None if position_ids.is_inference() else position_ids._version  # inference tensors have no version
    known = _FOUND.get(position_ids)
    if version is not None and known is not None and known[:2] == (version, batch_size):
        return known[2]
    is_first = (position_ids.diff() <= 0).expand(batch_size, -1)
    found = _cu_seqlens(is_first) if is_first.any() else None
    _FOUND[position_ids] = version, batch_size, found
    return found


def same_sequence(position_ids) -> Tensor:
    """bool (B or 1, 1, S, S): whether two tokens are in one of cu_seqlens_of's sequences. The host reads nothing."""
    number = pad(position_ids.diff() <= 0, (1, 0)).cumsum(1)
    return (number[:, :, None] == number[:, None, :])[:, None]


def _without_tensor(pattern, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, is_fixed, device):
    """The Mask of a causal or bidirectional pattern, or None if rows and keys do not fit together for one."""
    if isinstance(kv_offset, Tensor):
        return None
    if isinstance(q_offset, Tensor) and not is_fixed and can_read(q_offset):
        q_offset = int(q_offset)
    num_keys, seqused_k = kv_length, None
    end = q_offset - kv_offset + q_length  # one more than the index of the key that is the last row's own
    if pattern.causal and (is_fixed or isinstance(end, Tensor)):
        seqused_k = torch.zeros(batch_size, dtype=torch.int32, device=device) + end
    elif pattern.causal and 0 < end <= kv_length:
        num_keys = end
    elif pattern.causal or pattern.window != NO_WINDOW and (isinstance(end, Tensor) or end != kv_length):
        return None
    mask = Mask(q_length, kv_length, pattern.causal, pattern.window, num_keys, seqused_k=seqused_k,
                is_padded=attention_mask is not None)
    if attention_mask is None:
        return mask
    keys = attention_mask[:, kv_offset:kv_offset + num_keys]
    keys = pad(keys, (0, num_keys - keys.shape[1]))
    if not is_fixed and can_read(keys):
        # Whether all are valid, and whether padding comes last in each sample: then lengths stand for it.
        is_full, is_last = torch.stack((keys.all(), (keys[:, 1:] <= keys[:, :-1]).all())).tolist()
        if is_full:
            return mask
        if is_last and mask.seqused_k is None:
            lengths = keys.sum(1, dtype=torch.int32)
            if mask.causal and num_keys == q_length:  # rows in the padding then give 0
                return dataclasses.replace(mask, seqused_q=lengths, seqused_k=lengths)
            # Rows need not be those of the keys, as in cross-attention, and a window depends on both lengths.
            if not mask.causal and mask.window == NO_WINDOW:
                return dataclasses.replace(mask, seqused_k=lengths)
    return dataclasses.replace(mask, keys=keys)
