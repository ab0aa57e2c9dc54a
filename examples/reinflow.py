"""ReinFlow on one page: a flow policy improved by reinforcement learning (Zhang et al. 2025).

A flow policy generates its chunk by K Euler steps from noise, which gives no probability for a policy gradient.
ReinFlow adds a little learned Gaussian noise to every step. The chain of K steps then has an exact log-probability, and
PPO raises it for chains with a better result than expected. Afterwards the noise is removed: the robot gets the flow.

    python -m examples.reinflow                      # a few minutes; runs examples/flow_bc.py first where needed
    python -m examples.reinflow --quick              # the same path in seconds, to see that it runs
    python -m examples.reinflow --flow runs/flow_bc/flow.safetensors --iterations 100

Left out for brevity, see `robopolicy/algorithms/reinflow.py`: reward scaling, the schedule of the noise bounds, the
pull towards the base policy, and clamps on the chain and on its log-probability.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from examples import flow_bc
from examples.flow_bc import Flow, evaluate, first_episode, parse, vector
from robopolicy.evaluation.intervals import Interval
from robopolicy.nets.mlp import MLP
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Observation
from robopolicy.sim.registry import SimOptions, make_sim


@dataclass(frozen=True)
class Config:
    """Everything you may want to change; each field is a command-line option."""

    flow: str = "runs/flow_bc/flow.safetensors"  # base policy; trained first if the file does not exist
    task: str = "manipulation/lift"  # task of the base policy, where it has to be trained
    iterations: int = 40  # rollouts, each followed by an update
    decisions: int = 20  # T, chunks per environment in one rollout
    num_envs: int = 64  # N, environments in parallel
    gamma: float = 0.99  # discount per control step
    lam: float = 0.95  # GAE lambda
    epochs: int = 5  # passes over each rollout
    batch_size: int = 320  # chunks per minibatch
    clip: float = 0.01  # PPO clip; small, because log-probabilities are averages per action dimension
    target_kl: float = 0.01  # stop the epochs beyond this divergence
    actor_lr: float = 3e-4  # learning rate of flow and noise network
    critic_lr: float = 1e-3  # learning rate of the value function
    critic_warmup: int = 2  # iterations that train the value function alone
    noise_low: float = 0.05  # smallest noise per step, in normalised action units
    noise_high: float = 0.15  # largest
    entropy: float = 0.0  # bonus that keeps the noise up
    eval_episodes: int = 100  # held-out episodes, the same seeds before and after
    seed: int = 0  # of episodes, initial weights and exploration
    out: str = "runs/reinflow"  # where flow.safetensors goes
    quick: bool = False  # tiny sizes, to see in seconds that it runs


QUICK = {"iterations": 3, "decisions": 4, "num_envs": 4, "batch_size": 8, "critic_warmup": 1, "eval_episodes": 4}


# --------------------------------------------------------------------------------------------- the noisy chain


class NoiseNet(nn.Module):
    """Standard deviation of the noise that is added to each Euler step; not needed once training is over."""

    def __init__(self, flow: Flow, low: float, high: float) -> None:
        super().__init__()
        self.shape, self.low, self.high = flow.shape, math.log(low), math.log(high)
        self.net = MLP(len(flow.state_norm.offset) + 32, [64, 64], math.prod(flow.shape), activation="mish")

    def forward(self, features: Tensor) -> Tensor:
        """Map `features` `(B, D + 32)` to standard deviations `(B, H, A)` between the bounds, log-linearly."""
        share = (self.net(features).tanh() + 1) / 2
        return (self.low + (self.high - self.low) * share).exp().unflatten(1, self.shape)


def transition(flow: Flow, noise_net: NoiseNet, state: Tensor, x: Tensor, k: int) -> torch.distributions.Normal:
    """Distribution of step k + 1 of the chain, given step k `x` `(B, H, A)`.

    Sampling and scoring both call this one function, so the ratio of fresh data is exactly 1.
    """
    t = torch.full((len(x),), k / flow.steps)
    mean = x + flow.velocity(state, x, t) / flow.steps
    features = torch.cat([flow.state_norm.normalize(state), flow.time(t)], -1)
    return torch.distributions.Normal(mean, noise_net(features), validate_args=False)


@torch.no_grad()
def sample_chain(flow: Flow, noise_net: NoiseNet, state: Tensor) -> Tensor:
    """Sample chains `(B, K + 1, H, A)` from noise to chunk, in normalised units."""
    chain = [torch.randn(len(state), *flow.shape)]
    for k in range(flow.steps):
        chain.append(transition(flow, noise_net, state, chain[-1], k).sample())
    return torch.stack(chain, 1)


def score_chain(flow: Flow, noise_net: NoiseNet, state: Tensor, chain: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy `(B,)` of chains, averaged over the K steps and all H * A numbers.

    The first noise is sampled from a fixed distribution and cancels in every ratio.
    """
    steps = [transition(flow, noise_net, state, chain[:, k], k) for k in range(flow.steps)]
    logp = torch.stack([step.log_prob(chain[:, k + 1]) for k, step in enumerate(steps)], 1)  # (B, K, H, A)
    entropy = torch.stack([step.entropy() for step in steps], 1)
    return logp.mean((1, 2, 3)), entropy.mean((1, 2, 3))


# ------------------------------------------------------------------------------------------------- experience


@dataclass
class Rollout:
    """T chunk decisions of N environments."""

    state: Tensor  # (T, N, D) observation of the policy
    chain: Tensor  # (T, N, K + 1, H, A) from noise to chunk
    value: Tensor  # (T, N) critic before the chunk
    next_value: Tensor  # (T, N) critic after it, at the true last observation where an episode ended
    reward: Tensor  # (T, N) discounted sum over the executed steps
    discount: Tensor  # (T, N) gamma ** steps executed
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool
    success: Tensor  # (T, N) bool, for the log


@torch.no_grad()
def collect(
    sim: ChunkedSim, obs: Observation, flow: Flow, noise_net: NoiseNet, critic: Critic, decisions: int
) -> tuple[Rollout, Observation]:
    """Execute `decisions` chunks in every environment, exploring with the noisy chain."""
    rows: list[tuple[Tensor, ...]] = []
    for _ in range(decisions):
        state = vector(obs)[:, -1]  # (N, D)
        chain = sample_chain(flow, noise_net, state)
        step = sim.step(flow.action_norm.denormalize(chain[:, -1]))
        discount = sim.gamma**step.steps
        after = critic(vector(step.final_obs)[:, -1])
        won = step.done & step.info["success"]
        rows.append((state, chain, critic(state), after, step.reward, discount, step.terminated, step.truncated, won))
        obs = step.obs
    return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True))), obs


class Critic(nn.Module):
    """Expected discounted return of a state."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.norm = copy.deepcopy(flow.state_norm)
        self.net = MLP(len(self.norm.offset), [256, 256], 1, activation="mish")

    def forward(self, state: Tensor) -> Tensor:
        """Map `state` `(B, D)` to values `(B,)`."""
        return self.net(self.norm.normalize(state)).squeeze(-1)


def advantages(rollout: Rollout, lam: float) -> Tensor:
    """Generalised advantage estimation `(T, N)`.

    A terminated episode has no future. A truncated episode has one, but the next rows belong to another episode.
    """
    future = rollout.next_value * ~rollout.terminated
    residual = rollout.reward + rollout.discount * future - rollout.value
    carry = rollout.discount * lam * ~(rollout.terminated | rollout.truncated)
    advantage = torch.zeros_like(residual)
    running = torch.zeros_like(residual[0])
    for t in reversed(range(len(residual))):
        advantage[t] = running = residual[t] + carry[t] * running
    return advantage


# ------------------------------------------------------------------------------------------------ improvement


def ppo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Clipped surrogate: follow the advantage until the ratio leaves [1 - clip, 1 + clip]."""
    ratio = (logp - logp_old).exp()  # (B,)
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


class Learner:
    """Flow, noise network and critic with their optimisers."""

    def __init__(self, flow: Flow, config: Config) -> None:
        self.config = config
        self.flow = flow
        self.noise_net = NoiseNet(flow, config.noise_low, config.noise_high)
        self.critic = Critic(flow)
        self.actor_parameters = [*flow.parameters(), *self.noise_net.parameters()]
        self.actor_optimizer = torch.optim.Adam(self.actor_parameters, lr=config.actor_lr)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_lr)

    def update(self, rollout: Rollout, *, train_actor: bool) -> float:
        """Several epochs over one rollout; returns the divergence from the policy that collected it."""
        config = self.config
        state, chain = rollout.state.flatten(0, 1), rollout.chain.flatten(0, 1)  # (T * N, ...)
        advantage = advantages(rollout, config.lam).flatten()
        target = advantage + rollout.value.flatten()
        with torch.no_grad():
            logp_old, _ = score_chain(self.flow, self.noise_net, state, chain)
        kl = 0.0
        for _ in range(config.epochs):
            for rows in torch.randperm(len(state)).split(config.batch_size):
                critic_loss = nn.functional.mse_loss(self.critic(state[rows]), target[rows])
                descend(self.critic_optimizer, critic_loss)
                if not train_actor or kl > config.target_kl:
                    continue
                logp, entropy = score_chain(self.flow, self.noise_net, state[rows], chain[rows])
                better = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
                loss = ppo_loss(logp, logp_old[rows], better, config.clip) - config.entropy * entropy.mean()
                descend(self.actor_optimizer, loss)
                log_ratio = (logp - logp_old[rows]).detach()
                kl = (log_ratio.exp() - 1 - log_ratio).mean().item()  # unbiased and never negative
        return kl


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One gradient step, with the gradient's norm bounded to 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


# ------------------------------------------------------------------------------------------------ the program


def main(argv: Sequence[str] | None = None) -> tuple[Interval, Interval]:
    """Load or train the base, improve it, save it; returns success before and after."""
    config = parse(Config(), QUICK, __doc__, argv)
    path = Path(config.flow)
    if not path.is_file():
        flow_bc.main(["--task", config.task, "--out", str(path.parent), *(["--quick"] if config.quick else [])])
    flow, base = flow_bc.load(path)
    torch.set_num_threads(1)  # fastest for networks this small
    torch.manual_seed(config.seed)
    sim = make_sim(base.task, SimOptions(num_envs=config.num_envs))
    before = evaluate(flow, sim, base.action_horizon, config.eval_episodes)
    print(f"base        success {before:.1%} on {before.n} held-out episodes")

    learner = Learner(flow, config)
    chunked = ChunkedSim(sim, action_horizon=base.action_horizon, gamma=config.gamma)
    obs = chunked.reset(first_episode(config.seed))
    start = time.perf_counter()
    for iteration in range(config.iterations):
        rollout, obs = collect(chunked, obs, flow, learner.noise_net, learner.critic, config.decisions)
        kl = learner.update(rollout, train_actor=iteration >= config.critic_warmup)
        ended = (rollout.terminated | rollout.truncated).sum().clamp_min(1)
        wins = rollout.terminated.sum() / ended
        print(
            f"iteration {iteration:3d}  exploring success {wins:.1%}  kl {kl:.4f}  {time.perf_counter() - start:.0f} s"
        )

    after = evaluate(flow, sim, base.action_horizon, config.eval_episodes)
    print(f"fine-tuned  success {after:.1%} on {after.n} held-out episodes")
    flow_bc.save(flow, base, Path(config.out) / "flow.safetensors")
    print(f"wrote {config.out}/flow.safetensors")
    return before, after


if __name__ == "__main__":
    main()
