"""Tests of returns with hand-computed numbers: termination, truncation, early chunk ends, automatic reset."""

import pytest
import torch

from robopolicy.core.returns import chunk_discount, gae, nested_discount, sequence_gae, successor_values


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)  # (T, 1)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)  # (T, 1)


def assert_column(found: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(found, column(*expected))


def test_gae_without_an_end_bootstraps_from_the_last_value():
    # residuals: 1 + .5 - 1 = .5, 2 + .5 - 1 = 1.5, 3 + 1 - 1 = 3; trace .25
    never = flags(0, 0, 0)
    advantage, target = gae(column(1, 2, 3), column(1, 1, 1), column(1, 1, 2), never, never, 0.5, 0.5)
    assert_column(advantage, 0.5 + 0.25 * 2.25, 1.5 + 0.25 * 3, 3)
    assert_column(target, 2.0625, 3.25, 4)


def test_termination_cuts_the_bootstrap_for_any_successor_value():
    # residuals: .5, 1.5, 3 - 1 = 2; trace .25
    for garbage in (99.0, float("nan")):
        advantage, _ = gae(
            column(1, 2, 3), column(1, 1, 1), column(1, 1, garbage), flags(0, 0, 1), flags(0, 0, 0), 0.5, 0.5
        )
        assert_column(advantage, 1, 2, 2)


def test_truncation_bootstraps_from_the_final_observation():
    # residuals: .5, 1.5, 3 + .5 * 4 - 1 = 4; trace .25
    advantage, _ = gae(column(1, 2, 3), column(1, 1, 1), column(1, 1, 4), flags(0, 0, 0), flags(0, 0, 1), 0.5, 0.5)
    assert_column(advantage, 1.125, 2.5, 4)


def test_termination_wins_where_both_flags_are_set():
    advantage, _ = gae(column(3), column(1), column(4), flags(1), flags(1), 0.5, 0.5)
    assert_column(advantage, 2)


def test_an_automatic_reset_after_truncation_cuts_the_trace_and_hides_the_new_episode():
    # Episode one: t = 0, 1, its final observation has value 4; episode two starts at t = 2 with value 10.
    value, truncated, none = column(1, 1, 10, 1), flags(0, 1, 0, 0), flags(0, 0, 0, 0)
    successor = successor_values(value, torch.tensor([2.0]).double(), truncated, torch.tensor([4.0]).double())
    assert_column(successor, 1, 4, 1, 2)
    advantage, _ = gae(column(1, 2, 3, 4), value, successor, none, truncated, 0.5, 0.5)
    # residuals: .5, 2 + 2 - 1 = 3, 3 + .5 - 10 = -6.5, 4 + 1 - 1 = 4
    assert_column(advantage, 0.5 + 0.25 * 3, 3, -6.5 + 0.25 * 4, 4)


def test_an_automatic_reset_after_termination_cuts_both():
    value = column(1, 1, 10, 1)
    advantage, _ = gae(column(1, 2, 3, 4), value, column(1, 10, 1, 2), flags(0, 1, 0, 0), flags(0, 0, 0, 0), 0.5, 0.5)
    assert_column(advantage, 0.5 + 0.25 * 1, 1, -5.5, 4)


def test_environments_do_not_mix():
    ends = torch.zeros(3, 2, dtype=torch.bool)
    ends[1, 1] = True
    reward, value = torch.ones(3, 2), torch.zeros(3, 2)
    advantage, _ = gae(reward, value, value, ends, torch.zeros_like(ends), 1.0, 1.0)
    assert advantage.tolist() == [[3, 2], [2, 1], [1, 1]]


def test_truncated_chunk_bootstraps_with_its_executed_steps():
    # gamma .5, chunks of 4 with reward 1 per step; the second is truncated after 2 steps, final value 8.
    reward, steps = column(1 + 0.5 + 0.25 + 0.125, 1 + 0.5), torch.tensor([[4], [2]])
    discount = chunk_discount(0.5, steps).double()
    assert_column(discount, 0.0625, 0.25)
    advantage, _ = gae(reward, column(1, 2), column(2, 8), flags(0, 0), flags(0, 1), discount, 0.5)
    second = 1.5 + 0.25 * 8 - 2
    assert_column(advantage, 1.875 + 0.0625 * 2 - 1 + 0.0625 * 0.5 * second, second)


def test_discount_per_chunk_is_optional():
    assert chunk_discount(0.5, torch.tensor([[4], [2]]), "chunk").tolist() == [[0.5], [0.5]]
    with pytest.raises(ValueError, match="Discount unit"):
        chunk_discount(0.5, torch.tensor([[4]]), "second")


def test_chunks_with_lambda_one_give_the_step_level_return():
    generator = torch.Generator().manual_seed(0)
    reward = torch.rand(8, 1, generator=generator, dtype=torch.float64)
    no_value, no_end = torch.zeros_like(reward), flags(*[0] * 8)
    returns, _ = gae(reward, no_value, no_value, no_end, no_end, 0.9, 1.0)
    chunked = torch.stack([sum(0.9**j * reward[start + j] for j in range(4)) for start in (0, 4)])
    never = flags(0, 0)
    value = torch.zeros_like(chunked)
    discount = chunk_discount(0.9, torch.full((2, 1), 4)).double()
    advantage, _ = gae(chunked, value, value, never, never, discount, 1.0)
    torch.testing.assert_close(advantage, returns[::4], rtol=1e-6, atol=0)


def test_wrong_shapes_are_named():
    never = flags(0, 0)
    with pytest.raises(ValueError, match="next_value must have the shape of reward"):
        gae(column(1, 2), column(1, 2), column(1, 2, 3), never, never, 0.5, 0.5)
    with pytest.raises(ValueError, match="1 entries to bootstrap need final_value"):
        successor_values(column(1, 2), torch.zeros(1), flags(0, 1), torch.zeros(2))


def test_lambda_one_is_the_return_and_lambda_zero_the_residual():
    never = flags(0, 0, 0)
    reward, value, successor = column(1, 2, 3), column(1, 4, 2), column(4, 2, 0)
    _, target = gae(reward, value, successor, never, never, 0.5, 1.0)
    assert_column(target, 1 + 0.5 * 3.5, 2 + 0.5 * 3, 3)
    advantage, _ = gae(reward, value, successor, never, never, 0.5, 0.0)
    torch.testing.assert_close(advantage, reward + 0.5 * successor - value)


def test_nested_discount_does_not_discount_inside_an_action():
    # One action of two tokens, then one of one token. gamma .5 between actions, lambda .5 everywhere (POAD).
    unit = torch.tensor([[0, 0, 1]])
    discount = nested_discount(unit, 0.5).double()
    assert discount.tolist() == [[1.0, 0.5, 0.5]]
    reward, value = column(0, 1, 2).T, column(1, 2, 3).T
    advantage, target = sequence_gae(reward, value, discount, 0.5)
    # residuals: 0 + 2 - 1 = 1, 1 + .5 * 3 - 2 = .5, 2 - 3 = -1
    assert_column(advantage.T, 1 + 0.5 * 0.25, 0.5 + 0.25 * -1, -1)
    assert_column(target.T, 2.125, 2.25, 2)


def test_sequence_gae_with_one_decision_per_unit_equals_gae(decisions):
    reward, value = decisions.reward, decisions.value
    rows, length = decisions.shape
    discount = nested_discount(torch.arange(length).expand(rows, length), 0.9).double()
    advantage, _ = sequence_gae(reward, value, discount, 0.8)
    ends = torch.zeros(length, rows, dtype=torch.bool)
    ends[-1] = True
    successor = torch.cat([value.T[1:], torch.zeros(1, rows)])
    expected, _ = gae(reward.T, value.T, successor, ends, torch.zeros_like(ends), 0.9, 0.8)
    torch.testing.assert_close(advantage, expected.T, rtol=1e-6, atol=1e-6)


def test_equal_clocks_are_one_clock(decisions):
    unit = torch.zeros(decisions.shape, dtype=torch.long) if decisions.unit is None else decisions.unit
    discount = nested_discount(unit, 0.9, inner=0.9, mask=decisions.mask)
    assert bool((discount == torch.tensor(0.9)).all())


def test_masked_entries_are_skipped(decisions):
    """The result on a row equals the result on the row without its masked entries."""
    valid, reward, value = decisions.valid(), decisions.reward, decisions.value
    unit = torch.zeros(decisions.shape, dtype=torch.long) if decisions.unit is None else decisions.unit
    lam = nested_discount(unit, 0.7, inner=0.9, mask=valid).double()
    discount = nested_discount(unit, 0.8, mask=valid).double()
    dirty = value.masked_fill(~valid, torch.nan)
    advantage, target = sequence_gae(reward, dirty, discount, lam, valid)
    assert bool(target.isfinite().all())
    for row in range(len(decisions)):
        keep = valid[row]
        short = unit[row, keep].unsqueeze(0)
        alone, _ = sequence_gae(
            reward[row, keep].unsqueeze(0),
            value[row, keep].unsqueeze(0),
            nested_discount(short, 0.8).double(),
            nested_discount(short, 0.7, inner=0.9).double(),
        )
        torch.testing.assert_close(advantage[row, keep], alone[0])
        assert bool((advantage[row, ~keep] == 0).all())


def test_truncated_row_bootstraps():
    reward, value = column(1, 2).T, column(1, 1).T
    advantage, _ = sequence_gae(reward, value, 0.5, 0.5, last_value=torch.tensor([4.0]).double())
    assert_column(advantage.T, 0.5 + 0.25 * 3, 3)


def test_nested_discount_gae_is_cut_at_an_episode_end_inside_a_chain():
    """Denoising steps as time: K = 2 per chunk, gamma between chunks only, an episode end after the first chunk."""
    unit = torch.tensor([[0, 0, 1, 1]])
    discount = nested_discount(unit, 0.5).T.double()  # (T * K, N = 1)
    reward, value, successor = column(0, 1, 0, 2), column(1, 1, 1, 1), column(1, 9, 1, 4)
    advantage, _ = gae(reward, value, successor, flags(0, 1, 0, 0), flags(0, 0, 0, 0), discount, 0.5)
    # residuals: 0 + 1 - 1 = 0, 1 - 1 = 0, 0, 2 + .5 * 4 - 1 = 3
    assert_column(advantage, 0, 0, 0.5 * 3, 3)
