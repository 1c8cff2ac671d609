from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.core.errors import ConfigError, DataError
from trimtab.model.attention import plan_sequences, plan_shared_prompts
from trimtab.model.config import ModelConfig
from trimtab.model.transformer import Transformer, drop_layers, rope_frequencies

Alone = Callable[[Transformer, Tensor], Tensor]
LENGTHS = [7, 1, 23, 12, 30, 4]


def sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (n,), generator=generator) for n in lengths]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_packed_equals_each_sequence_alone(model: Transformer, alone: Alone) -> None:
    rows = sequences(LENGTHS)
    packed = model(torch.cat(rows), plan_sequences(LENGTHS))
    for got, row in zip(packed.split(LENGTHS), rows, strict=True):
        close(got, alone(model, row))


def test_order_of_rows_does_not_matter(model: Transformer) -> None:
    rows = sequences(LENGTHS)
    forward = model(torch.cat(rows), plan_sequences(LENGTHS)).split(LENGTHS)
    backward = model(torch.cat(rows[::-1]), plan_sequences(LENGTHS[::-1])).split(LENGTHS[::-1])
    for a, b in zip(forward, backward[::-1], strict=True):
        close(a, b)


def test_a_later_token_never_reaches_an_earlier_one(model: Transformer) -> None:
    (row,) = sequences([12])
    changed = row.clone()
    changed[8] = (changed[8] + 1) % 61
    plan = plan_sequences([12])
    before, after = model(row, plan), model(changed, plan)
    close(after[:8], before[:8])
    assert (after[8:] - before[8:]).abs().max() > 1e-2


def test_shared_prompts_equal_full_sequences_in_value_and_weight_gradient(model: Transformer, alone: Alone) -> None:
    prompt_lengths, prompt_of_row, response_lengths = [5, 9, 3], [0, 0, 1, 2, 2, 1], [7, 0, 12, 1, 30, 4]
    prompts, responses = sequences(prompt_lengths, 1), sequences(response_lengths, 2)
    plan = plan_shared_prompts(prompt_lengths, prompt_of_row, response_lengths)
    tokens = torch.cat([*prompts, *responses])

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model.logits(hidden), target, reduction="none")

    shared = loss(model(tokens, plan)[plan.predict_index], tokens[plan.target_index])
    separate = []
    for row, prompt in enumerate(prompt_of_row):
        full = torch.cat([prompts[prompt], responses[row]])
        first = prompt_lengths[prompt]
        separate.append(loss(alone(model, full)[first - 1 : -1], full[first:]))
    reference = torch.cat(separate)
    close(shared, reference)
    weights = torch.linspace(-1, 1, len(shared))
    got = torch.autograd.grad((shared * weights).sum(), list(model.parameters()))
    want = torch.autograd.grad((reference * weights).sum(), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def fill_in_chunks(model: Transformer, rows: list[Tensor], slots: Tensor, max_len: int) -> tuple[list[Tensor], Any]:
    """Extend every row to its end in chunks of random ragged sizes (zero included); the hidden states by row."""
    generator = torch.Generator().manual_seed(3)
    cache = model.new_cache(8, max_len)
    start = torch.zeros(len(rows), dtype=torch.int64)
    total = torch.tensor([len(row) for row in rows])
    hidden: list[list[Tensor]] = [[] for _ in rows]
    while (start < total).any():
        count = torch.minimum(torch.randint(0, 7, (len(rows),), generator=generator), total - start)
        tokens = torch.full((len(rows), 7), 60)
        for i, row in enumerate(rows):
            tokens[i, : count[i]] = row[start[i] : start[i] + count[i]]
        out = model.extend(tokens, start, count, cache, slots)
        assert out.shape == (len(rows), 7, 32)
        for i in range(len(rows)):
            hidden[i].append(out[i, : count[i]])
        start = start + count
    return [torch.cat(parts) for parts in hidden], cache


def test_extend_in_ragged_chunks_equals_full_forward(model: Transformer, alone: Alone) -> None:
    rows = sequences(LENGTHS)
    # max_len is the longest row: padding columns then lie outside the cache and must not be written anywhere.
    hidden, _ = fill_in_chunks(model, rows, torch.tensor([3, 0, 5, 1, 7, 2]), max_len=max(LENGTHS))
    for got, row in zip(hidden, rows, strict=True):
        close(got, alone(model, row).detach())


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("slots", [slice(0, 6), slice(2, 8), torch.tensor([4, 0, 7, 1, 2, 6])], ids=str)
def test_decode_equals_full_forward(model: Transformer, alone: Alone, slots: slice | Tensor, spare: int) -> None:
    rows = sequences(LENGTHS)
    index = torch.arange(8)[slots] if isinstance(slots, slice) else slots
    _, cache = fill_in_chunks(model, rows, index, max_len=40)
    start = torch.tensor(LENGTHS)
    for step in range(3):
        tokens = torch.randint(61, (6,), generator=torch.Generator().manual_seed(step))
        rows = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens, strict=True)]
        hidden = model.decode(tokens, start, cache, slots, int(start.max()) + 1 + spare)
        start = start + 1
        close(hidden, torch.stack([alone(model, row)[-1] for row in rows]).detach())


def test_writes_touch_only_the_new_positions_of_their_own_slots(model: Transformer) -> None:
    cache = model.new_cache(4, 10)
    cache.k.normal_(generator=torch.Generator().manual_seed(0))
    cache.v.normal_(generator=torch.Generator().manual_seed(1))
    before = cache.k.clone(), cache.v.clone()
    start, count, slots = torch.tensor([9, 4, 10]), torch.tensor([1, 2, 0]), torch.tensor([2, 0, 3])
    model.extend(torch.full((3, 5), 7), start, count, cache, slots)
    model.decode(torch.tensor([5]), torch.tensor([3]), cache, slice(1, 2), 4)
    written = torch.zeros(4, 10, dtype=torch.bool)
    written[2, 9] = written[0, 4] = written[0, 5] = written[1, 3] = True
    for now, then in zip((cache.k, cache.v), before, strict=True):
        changed = (now != then).any(-1).any(2).any(0)  # (slots, positions)
        assert torch.equal(changed, written)


def test_stale_entries_beyond_the_length_never_matter(model: Transformer, alone: Alone) -> None:
    (row,) = sequences([6])
    cache = model.new_cache(2, 16)
    cache.k.fill_(1e3)
    cache.v.fill_(1e3)
    tokens = torch.stack([row, row.flip(0)])
    start, count = torch.tensor([0, 0]), torch.tensor([6, 2])
    model.extend(tokens, start, count, cache, torch.tensor([0, 1]))
    hidden = model.decode(torch.tensor([3, 3]), count, cache, slice(0, 2), 7)
    close(hidden[0], alone(model, torch.cat([row, torch.tensor([3])]))[-1].detach())
    close(hidden[1], alone(model, torch.cat([row.flip(0)[:2], torch.tensor([3])]))[-1].detach())


def test_fork_continues_as_if_each_had_its_own_prompt(model: Transformer, alone: Alone) -> None:
    prompts = sequences([5, 8])
    cache = model.new_cache(6, 12)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    tokens[0, :5], tokens[1] = prompts[0], prompts[1]
    model.extend(tokens, torch.tensor([0, 0]), torch.tensor([5, 8]), cache, torch.tensor([0, 1]))
    cache.copy_slots([0, 1, 0], [2, 3, 4], 8)
    parents = [0, 1, 0, 1, 0]
    start = torch.tensor([len(prompts[p]) for p in parents])
    new = torch.tensor([11, 12, 13, 14, 15])
    hidden = model.decode(new, start, cache, slice(0, 5), 9)
    for row, parent in enumerate(parents):
        close(hidden[row], alone(model, torch.cat([prompts[parent], new[row : row + 1]]))[-1].detach())


def test_copy_slots_reads_all_sources_before_it_writes(model: Transformer) -> None:
    cache = model.new_cache(3, 4)
    cache.k.copy_(torch.arange(3.0)[None, :, None, None, None])
    cache.copy_slots([0, 1, 2], [1, 2, 0], 3)
    assert cache.k[0, :, 0, 0, 0].tolist() == [2, 0, 1]
    assert cache.k[0, :, 0, 3, 0].tolist() == [0, 1, 2]  # beyond the copied length


def test_compact_moves_only_slots_behind_the_front(model: Transformer) -> None:
    cache = model.new_cache(6, 4)
    cache.v.copy_(torch.arange(6.0)[None, :, None, None, None])
    order = cache.compact([5, 1, 3], 4)
    assert sorted(order) == [1, 3, 5]
    assert order[1] == 1  # already in front: stays
    assert cache.v[0, :3, 0, 0, 0].tolist() == order
    assert cache.compact([], 4) == []
    with pytest.raises(DataError, match="twice"):
        cache.compact([1, 1], 4)


def test_grow_keeps_contents(model: Transformer, alone: Alone) -> None:
    (row,) = sequences([6])
    cache = model.new_cache(1, 6)
    model.extend(row[None], torch.tensor([0]), torch.tensor([6]), cache, torch.tensor([0]))
    with pytest.raises(DataError, match="length = 7 exceeds the cache's max_len = 6"):
        model.decode(torch.tensor([1]), torch.tensor([6]), cache, slice(0, 1), 7)
    cache.grow(9)
    assert cache.max_len == 9
    hidden = model.decode(torch.tensor([1]), torch.tensor([6]), cache, slice(0, 1), 7)
    close(hidden[0], alone(model, torch.cat([row, torch.tensor([1])]))[-1].detach())
    cache.grow(3)
    assert cache.max_len == 9


def test_generation_leaves_no_graph_behind(model: Transformer) -> None:
    cache = model.new_cache(1, 4)
    hidden = model.extend(
        torch.ones(1, 2, dtype=torch.int64), torch.tensor([0]), torch.tensor([2]), cache, torch.tensor([0])
    )
    hidden = model.decode(torch.tensor([1]), torch.tensor([2]), cache, slice(0, 1), 3)
    assert not hidden.requires_grad
    assert not cache.k.requires_grad


def test_bfloat16_keeps_positions_exact_and_stays_near_float32(model: Transformer) -> None:
    (row,) = sequences([30])
    exact = model(row, plan_sequences([30])).detach()
    model.to(torch.bfloat16)
    assert model.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(model.rotary.inv_freq, rope_frequencies(model.config))
    hidden = model(row, plan_sequences([30]))
    assert hidden.dtype == torch.bfloat16
    assert (hidden.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    cache = model.new_cache(1, 30)
    assert cache.k.dtype == torch.bfloat16
    cached = model.extend(row[None, :29], torch.tensor([0]), torch.tensor([29]), cache, torch.tensor([0]))
    last = model.decode(row[29:], torch.tensor([29]), cache, slice(0, 1), 30)
    assert (torch.cat([cached[0], last]).float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_cache_in_a_smaller_dtype_than_the_model(model: Transformer, alone: Alone) -> None:
    (row,) = sequences([10])
    cache = model.new_cache(1, 10, dtype=torch.bfloat16)
    hidden = model.extend(row[None], torch.tensor([0]), torch.tensor([10]), cache, torch.tensor([0]))
    exact = alone(model, row).detach()
    assert hidden.dtype == torch.float32
    assert 0 < (hidden[0] - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_equals_cpu(model: Transformer, alone: Alone) -> None:
    lengths = ([5, 9], [0, 1, 1], [7, 0, 12])
    tokens = torch.cat(sequences([5, 9, 7, 12]))
    plan = plan_shared_prompts(*lengths)
    expected = model(tokens, plan).detach()
    rows = sequences(LENGTHS)
    wanted = torch.stack([alone(model, row)[-1] for row in rows]).detach()
    model.to("cuda")
    close(model(tokens.cuda(), plan.to("cuda")).detach().cpu(), expected, 1e-3)
    cache = model.new_cache(6, 30)
    padded = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True).cuda()
    start = torch.tensor(LENGTHS, device="cuda") - 1
    model.extend(padded, torch.zeros_like(start), start, cache, torch.arange(6, device="cuda"))
    last = torch.stack([row[-1] for row in rows]).cuda()
    close(model.decode(last, start, cache, slice(0, 6), 30).cpu(), wanted, 1e-3)


def test_sliding_window_refuses_only_longer_sequences(lively: Any, make_config: Any) -> None:
    model = lively(make_config(family="mistral", sliding_window=8))
    assert model(torch.ones(8, dtype=torch.int64), plan_sequences([8])).shape == (8, 32)
    with pytest.raises(DataError, match="9 tokens exceeds the model's sliding window of 8"):
        model(torch.ones(9, dtype=torch.int64), plan_sequences([9]))
    cache = model.new_cache(1, 16)
    one, zero = torch.tensor([1]), torch.tensor([0])
    with pytest.raises(DataError, match="sliding window"):
        model.extend(torch.ones(1, 9, dtype=torch.int64), zero, torch.tensor([9]), cache, zero)
    with pytest.raises(DataError, match="sliding window"):
        model.decode(one, torch.tensor([8]), cache, slice(0, 1), 9)


def test_wrong_inputs_are_named(model: Transformer) -> None:
    with pytest.raises(DataError, match=r"tokens have shape \(4,\), the plan is for \(5,\)"):
        model(torch.ones(4, dtype=torch.int64), plan_sequences([5]))
    cache = model.new_cache(2, 4)
    one = torch.tensor([1])
    with pytest.raises(DataError, match="length = 5 exceeds"):
        model.extend(torch.ones(1, 4, dtype=torch.int64), one, torch.tensor([4]), cache, one)
    with pytest.raises(DataError, match="2 sources but 1 destinations"):
        cache.copy_slots([0, 1], [1], 2)


def test_nothing_to_do_is_a_defined_result(model: Transformer) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert model(none, plan_sequences([])).shape == (0, 32)
    cache = model.new_cache(2, 4)
    assert model.extend(none.view(0, 3), none, none, cache, none).shape == (0, 3, 32)
    slots = torch.tensor([0, 1])
    out = model.extend(torch.ones(2, 3, dtype=torch.int64), torch.tensor([1, 0]), torch.tensor([0, 0]), cache, slots)
    assert out.shape == (2, 3, 32)
    assert not out.any()
    assert model.decode(none, none, cache, slice(0, 0), 1).shape == (0, 32)


def test_init_depends_on_the_seed_alone(make_config: Callable[..., ModelConfig]) -> None:
    config = make_config(qkv_bias=True, hidden_size=256)
    torch.manual_seed(1)
    a = Transformer.init(config, 5)
    torch.manual_seed(2)
    b, c = Transformer.init(config, 5), Transformer.init(config, 6)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    block = a.blocks[0]
    assert block.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.down.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert block.o.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert not block.qkv.bias.any()
    assert torch.equal(a.norm.weight, torch.ones(256))


def test_a_tied_head_is_the_embedding_and_counts_once(make_config: Callable[..., ModelConfig]) -> None:
    tied, untied = (Transformer.init(make_config(tie_embeddings=tie), 0) for tie in (True, False))
    assert tied.head_weight is tied.embed.weight
    assert untied.head_weight is not untied.embed.weight
    assert untied.num_parameters() - tied.num_parameters() == 61 * 32
    # embed + final norm + 3 x (qkv, o, gate_up, down, two norms)
    block = 32 * (6 + 2 + 2) * 8 + 48 * 32 + 3 * 48 * 32 + 2 * 32
    assert tied.num_parameters() == 61 * 32 + 32 + 3 * block
    hidden = torch.randn(2, 32)
    close(tied.logits(hidden), hidden @ tied.embed.weight.T)


@torch.no_grad()
def logits(model: Transformer, row: Tensor) -> Tensor:
    return model.logits(model(row, plan_sequences([len(row)])))


def test_drop_layers_copies_what_it_keeps(model: Transformer) -> None:
    (row,) = sequences([12])
    model(sequences([5])[0], plan_sequences([5])).sum().backward()
    shallow = drop_layers(model, [0, 2])
    assert shallow.config.num_layers == len(shallow.blocks) == 2
    assert shallow.new_cache(1, 4).k.shape[0] == 2
    assert all(parameter.grad is None for parameter in shallow.parameters())
    assert torch.equal(shallow.blocks[1].down.weight, model.blocks[2].down.weight)
    all_kept = drop_layers(model, range(3))
    assert torch.equal(logits(all_kept, row), logits(model, row))
    before = logits(model, row)
    with torch.no_grad():
        for parameter in shallow.parameters():
            parameter.zero_()
    assert torch.equal(logits(model, row), before)
    assert model.config.num_layers == 3


@pytest.mark.parametrize("keep", [[], [0, 3], [-1, 0], [1, 0], [1, 1]])
def test_drop_layers_names_bad_indices(model: Transformer, keep: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"keep: .*0\.\.2"):
        drop_layers(model, keep)
