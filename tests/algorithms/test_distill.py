"""Tests of distillation: the teacher's ODE, consistency distillation, reflow, and the weights that stay fixed."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.bc import BC
from robopolicy.algorithms.distill import Distill, DistillConfig, distillation_loss
from robopolicy.algorithms.reflow import Reflow, ReflowConfig, reflow_loss
from robopolicy.cli.main import main
from robopolicy.data.chunks import ChunkBatch
from robopolicy.data.collect import collect
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.consistency import ConsistencyPolicy
from robopolicy.policies.heads.edm import preconditioning
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import karras_sigmas, ode_solve, ode_step
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.compose import compose_config
from robopolicy.training.runs import resume_run, start_run

M, S = 0.4, 0.3
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "action_clip": 0.0}
POINT = PolicySpec({"state": (1,)}, action_dim=1)
CHUNK = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2, obs_horizon=2)
TEACHERS = ("flow", "diffusion", "edm", "shortcut", "meanflow")


class GaussianVelocity(nn.Module):
    """Exact velocity of the flow from N(0, 1) to N(M, S^2), with a parameter so that it has a device."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        t = t.view(-1, 1, 1)
        return M + (t * S**2 - (1 - t)) / ((1 - t) ** 2 + (t * S) ** 2) * (x - t * M)


class GaussianConsistency(nn.Module):
    """The network of the exact consistency function, which maps every trajectory of N(M, S^2) to its end."""

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        sigma = (4 * t.double()).exp().view(-1, 1, 1)
        c_in, above = preconditioning(sigma, 0.5)[2], sigma - 0.002
        x = x.double() / c_in
        end = M + ((S**2 + 0.002**2) / (S**2 + sigma**2)).sqrt() * (x - M)
        return ((end - 0.25 / (above**2 + 0.25) * x) / (above * 0.5 * c_in).clamp(min=1e-9)).float()


def exact_flow() -> FlowPolicy:
    policy = FlowPolicy(FlowConfig(hidden=(64, 64), **RAW), POINT)
    policy.backbone = GaussianVelocity()
    return policy


def gaussian_chunks(rows: int, seed: int | None = None) -> ChunkBatch:
    """Chunks of N(M, S^2) with constant observations."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    chunk = M + S * torch.randn(rows, 1, 1, generator=generator)
    return ChunkBatch({"state": torch.zeros(rows, 1, 1)}, chunk, torch.ones(rows, 1))


def teacher(name: str = "flow", **settings: Any) -> GenerativePolicy:
    torch.manual_seed(0)
    policy_class = POLICIES[name]
    config_class = policy_class.config_class
    policy = policy_class(config_class(hidden=(16,), **settings), CHUNK)  # type: ignore[call-arg]
    policy.fit_normalizer(
        {"state": {"min": [-1.0] * 3, "max": [2.0] * 3}, "action": {"min": [-2.0] * 2, "max": [1, 3]}}
    )
    assert isinstance(policy, GenerativePolicy)
    return policy


def batch(seed: int) -> ChunkBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(8, 4)
    mask[3, 2:] = 0
    state = torch.randn(8, 2, 3, generator=generator)
    return ChunkBatch({"state": state}, torch.rand(8, 4, 2, generator=generator), mask, torch.ones(8))


def make(algorithm: str, policy: GenerativePolicy | None = None, **settings: Any) -> Any:
    config_class, algorithm_class = {"distill": (DistillConfig, Distill), "reflow": (ReflowConfig, Reflow)}[algorithm]
    return algorithm_class(config_class(**settings), policy or teacher(), total_updates=6)


both = pytest.mark.parametrize("algorithm", ["distill", "reflow"])


def test_teacher_steps_are_of_second_order_and_end_at_the_gaussian_map() -> None:
    policy, noise = exact_flow(), torch.linspace(-2, 2, 9).view(-1, 1, 1)
    obs = {"state": torch.zeros(9, 1, 1)}
    errors = [float((ode_solve(policy, obs, noise, n) - (M + S * noise)).abs().max()) for n in (10, 20, 40)]
    assert errors[2] < 0.02 and errors[1] < 0.6 * errors[0] and errors[2] < 0.6 * errors[1]
    t, to = torch.full((9,), 0.2), torch.full((9,), 0.3)
    x = torch.randn(9, 1, 1)
    ratio = math.sqrt((0.3 * S) ** 2 + 0.49) / math.sqrt((0.2 * S) ** 2 + 0.64)
    exact = 0.3 * M + ratio * (x - 0.2 * M)
    halves = ode_step(policy, obs, ode_step(policy, obs, x, t, t + 0.05), t + 0.05, to)
    coarse, fine = ((found - exact).abs().max() for found in (ode_step(policy, obs, x, t, to), halves))
    assert float(coarse) < 5e-4 and float(fine) < 0.35 * float(coarse)


def test_an_exact_student_of_an_exact_teacher_has_almost_no_loss() -> None:
    algorithm = Distill(DistillConfig(), exact_flow(), total_updates=1)
    student = algorithm.policy.eval()

    def loss(levels: int) -> float:
        return distillation_loss(student, student, algorithm.teacher, gaussian_chunks(512, 0), levels)[0].item()

    untrained = loss(40)
    student.backbone = GaussianConsistency()
    assert loss(40) < 0.01 * untrained and loss(160) < 0.1 * loss(40)


def test_the_loss_is_the_squared_distance_to_the_next_lower_level_over_the_level_difference() -> None:
    algorithm, data = Distill(DistillConfig(), exact_flow(), total_updates=1), gaussian_chunks(64, 0)
    student, target = algorithm.policy.eval(), Distill(DistillConfig(), exact_flow(), total_updates=1).policy.eval()
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    loss, _ = distillation_loss(student, target, algorithm.teacher, data, 10, generators[0])
    index, sigmas = torch.randint(9, (64,), generator=generators[1]), karras_sigmas(10, 0.002, 80.0, 7.0)[:-1].float()
    high, low = sigmas[index].view(-1, 1, 1), sigmas[index + 1].view(-1, 1, 1)
    x = data.chunk + high * torch.randn(64, 1, 1, generator=generators[1])
    start, end = 1 / (1 + high), 1 / (1 + low)
    below = ode_step(algorithm.teacher, data.obs, start * x, start.flatten(), end.flatten()) / end
    with torch.no_grad():
        wanted = target.denoise(target.encode(data.obs), below, low)
    expected = ((student.denoise(student.encode(data.obs), x, high) - wanted).square() / (high - low)).mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.slow
def test_the_student_reproduces_the_distribution_of_the_teacher_in_one_call() -> None:
    torch.manual_seed(0)
    config = DistillConfig(lr=5e-3, warmup=20, levels=10, sigma_max=10.0)
    algorithm = Distill(config, exact_flow(), total_updates=500)
    for _ in range(500):
        algorithm.update(gaussian_chunks(256))
    student = algorithm.inference_policy()
    assert student.nfe == 1
    noise = torch.randn(4000, 1, 1)
    output = student.decode({"state": torch.zeros(4000, 1, 1)}, noise)
    assert float(output.mean()) == pytest.approx(M, abs=0.04) and float(output.std()) == pytest.approx(S, abs=0.06)
    assert float((output - (M + S * noise)).abs().mean()) < 0.08  # and maps each noise to the output of the teacher


@pytest.mark.slow
def test_reflow_straightens_a_flow_between_two_modes() -> None:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(hidden=(64, 64), **RAW), POINT)
    obs, chunk = {"state": torch.zeros(256, 1, 1)}, 0.6 * torch.ones(256, 1, 1)
    chunk[:128] *= -1
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for i in range(300):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - i / 300)
        loss, _ = policy.imitation_loss(obs, chunk)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    noise = torch.linspace(-2, 2, 256).view(-1, 1, 1)
    end = ode_solve(policy, obs, noise, 50)

    def error_of_one_step() -> float:
        one = noise + policy.field(obs, noise, torch.zeros(256)).detach()
        return float((one - end).abs().mean())

    before = error_of_one_step()
    algorithm = Reflow(ReflowConfig(lr=3e-3, warmup=20, teacher_steps=8), policy, total_updates=200)
    for _ in range(200):
        algorithm.update(ChunkBatch(obs, chunk, torch.ones(256, 1)))
    policy = algorithm.inference_policy()  # type: ignore[assignment]
    assert before > 0.5 and error_of_one_step() < 0.35 * before


@pytest.mark.parametrize("name", TEACHERS)
def test_any_head_with_a_flow_can_be_the_teacher_and_stays_bit_identical(name: str) -> None:
    policy = teacher(name)
    before = copy.deepcopy(policy.state_dict())
    algorithm = make("distill", policy)
    started = copy.deepcopy(algorithm.policy.state_dict())
    metrics = algorithm.update(batch(0))
    assert math.isfinite(metrics["actor/distillation"])
    for held in (policy, algorithm.teacher):
        assert all(torch.equal(before[key], value) for key, value in held.state_dict().items())
    student = algorithm.policy.state_dict()
    assert any(not torch.equal(started[key], value) for key, value in student.items() if key.startswith("backbone"))


def test_the_student_inherits_architecture_and_units() -> None:
    policy = teacher("edm", backbone="unet", unet_channels=(8, 16), action_clip=0.8)
    student = make("distill", policy, steps=2).inference_policy()
    assert isinstance(student, ConsistencyPolicy) and student.spec == policy.spec
    assert (student.config.backbone, student.config.unet_channels) == ("unet", (8, 16))
    assert (student.config.action_clip, student.nfe) == (0.8, 2)
    for new, old in ((student.encoder, policy.encoder), (student.action_normalizer, policy.action_normalizer)):
        state = old.state_dict()
        assert state and all(torch.equal(state[key], value) for key, value in new.state_dict().items())


def test_padded_steps_and_weights_count_as_in_imitation() -> None:
    algorithm, data = make("distill"), batch(0)

    def loss(mask: Tensor, weight: Tensor) -> float:
        part = ChunkBatch(data.obs, data.chunk, mask, weight)
        generator = torch.Generator().manual_seed(0)
        policy = algorithm.policy.eval()
        return distillation_loss(policy, policy, algorithm.teacher, part, 18, generator)[0].item()

    assert loss(torch.zeros(8, 4), torch.ones(8)) == 0.0 == loss(torch.ones(8, 4), torch.zeros(8))
    assert loss(torch.ones(8, 4), 2 * torch.ones(8)) == pytest.approx(2 * loss(torch.ones(8, 4), torch.ones(8)))


def test_the_target_follows_the_student_and_the_average_is_deployed() -> None:
    algorithm, own = make("distill", target_decay=0.5), make("distill", target_decay=0.0, ema=False)
    for i in range(6):
        before = copy.deepcopy(algorithm.target.module.state_dict())
        algorithm.update(batch(i))
        own.update(batch(i))
    weight = "backbone.body.0.weight"
    student, target = algorithm.policy.state_dict()[weight], algorithm.target.module.state_dict()[weight]
    torch.testing.assert_close(target, (before[weight] + student) / 2)
    assert algorithm.inference_policy() is algorithm.ema.module is not algorithm.target.module
    assert torch.equal(own.policy.state_dict()[weight], own.target.module.state_dict()[weight])
    assert own.inference_policy() is own.policy


def test_reflow_trains_the_flow_on_its_own_pairs() -> None:
    policy, data = teacher(), batch(0)
    algorithm = make("reflow", policy, teacher_steps=3)
    loss, _ = reflow_loss(policy.eval(), algorithm.teacher, data, 3, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    noise = policy.draw_noise(8, generator, torch.device("cpu"))
    ends = ode_solve(policy, data.obs, noise, 3)
    expected = policy.matching_loss(policy.encode(data.obs), ends, noise, policy.sample_times(8, generator))
    torch.testing.assert_close(loss, expected.mean())
    before = copy.deepcopy(algorithm.teacher.state_dict())
    algorithm.update(data)
    assert all(torch.equal(before[key], value) for key, value in algorithm.teacher.state_dict().items())
    assert any(not torch.equal(before[key], value) for key, value in policy.state_dict().items())


def test_unsupported_teachers_are_refused() -> None:
    policy_class = POLICIES["gaussian"]
    config_class = policy_class.config_class
    gaussian = policy_class(config_class(), CHUNK)  # type: ignore[call-arg]
    for policy in (gaussian, teacher("consistency")):
        with pytest.raises(UserError, match=f"flow, diffusion or edm policy as teacher, got '{policy.name}'"):
            make("distill", policy)  # type: ignore[arg-type]
    for name in ("shortcut", "edm"):
        with pytest.raises(UserError, match=f"of a 'flow', got '{name}'"):
            make("reflow", teacher(name))


def test_distill_and_reflow_extend_behaviour_cloning() -> None:
    assert issubclass(Distill, BC) and issubclass(Reflow, BC)
    assert make("distill").data_source == "dataset"


@pytest.mark.slow
def test_a_run_distils_a_checkpoint_and_can_be_resumed(tmp_path: Path) -> None:
    sim, expert = make_sim("toy/point_mass", SimOptions(num_envs=5)), get_task("toy/point_mass").make_expert
    assert expert is not None
    with LeRobotWriter(tmp_path / "data", control_dt=sim.spec.control_dt) as writer:
        collect(sim, expert(), writer, episodes=5)
    common = [f"dataset={tmp_path / 'data'}", f"out={tmp_path}", "evaluation.episodes=0", "algorithm.batch_size=16"]
    assert main(["train", *common, "policy.hidden=[16]", "budget.updates=2", "name=base", "task=point_mass"]) == 0
    source = f"init_from={tmp_path / 'base' / 'checkpoints' / 'last'}"
    settings = [*common, "algorithm=distill", source, "budget.updates=4", "checkpoint_every=2", "logging.every=1"]
    assert main(["train", *settings, "name=whole"]) == 0

    trainer = start_run(compose_config([*settings, "name=part"]))
    advance, done = trainer.algorithm.update, []

    def stop_after_three(data: ChunkBatch) -> dict[str, float]:
        done.append(1)
        if len(done) == 4:
            raise RuntimeError("killed")
        return advance(data)

    trainer.algorithm.update = stop_after_three  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        trainer.train()
    resume_run(tmp_path / "part").train()
    whole, part = (load_policy(tmp_path / name / "checkpoints" / "last")[0] for name in ("whole", "part"))
    assert whole.name == "consistency"
    assert all(torch.equal(value, part.state_dict()[key]) for key, value in whole.state_dict().items())
