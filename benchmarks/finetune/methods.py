"""The rows of the table: which head each fine-tuner improves, and the settings that differ from its defaults.

Settings were chosen on task lift with seeds that the table does not use; the other tasks run with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

ON_POLICY = (
    "sim.num_envs=32",
    "algorithm.decisions=16",
    "algorithm.batch_size=512",
    "algorithm.lr=3e-4",
    "algorithm.lr_final=1e-4",
    "algorithm.critic_lr=1e-3",
    "algorithm.critic_warmup=2",
)
OFF_POLICY = ("sim.num_envs=8", "algorithm.utd=0.5", "replay.warmup_steps=4000", "replay.capacity=400000")


@dataclass(frozen=True)
class Method:
    """One row."""

    name: str
    algorithm: str
    head: str = "flow"  # policy preset of the base
    settings: tuple[str, ...] = ()
    demonstrations: bool = False  # also learns from the demonstrations
    from_scratch: bool = False  # no base policy
    whole_episodes: bool = False  # plays whole episodes, so that its budget is counted in updates
    head_settings: tuple[str, ...] = ()  # sampler of the base, e.g. its number of steps


METHODS = {
    method.name: method
    for method in (
        Method(
            "reinflow",
            "reinflow",
            settings=(
                *ON_POLICY,
                "algorithm.entropy_coef=0",
                "algorithm.logp_clamp=null",
                "algorithm.noise.std_min=0.08",
                "algorithm.noise.std_max=0.16",
            ),
        ),
        Method("dppo", "dppo", "diffusion", ON_POLICY),
        Method(
            "flow_grpo",
            "flow_grpo",
            settings=("sim.num_envs=32", "algorithm.batch_size=512", "algorithm.lr=3e-4", "algorithm.lr_final=1e-4"),
            whole_episodes=True,
        ),
        Method("flow_sde", "flow_sde", settings=ON_POLICY),
        Method("fpo", "fpo", settings=ON_POLICY),
        Method("fpo_pp", "fpo_pp", settings=ON_POLICY),
        Method("awm", "awm", settings=ON_POLICY),
        Method("ac_flow", "ac_flow", settings=ON_POLICY),
        Method("policyflow", "policyflow", settings=ON_POLICY),
        Method("dsrl_sac", "dsrl_sac", settings=OFF_POLICY),
        Method("dsrl_na", "dsrl_na", settings=OFF_POLICY),
        Method("pa_rl", "pa_rl", settings=OFF_POLICY, demonstrations=True),
        Method("pa_rl-diffusion", "pa_rl", "diffusion", OFF_POLICY, demonstrations=True),
        Method("expo", "expo", settings=OFF_POLICY, demonstrations=True),
        Method("qc", "qc", settings=OFF_POLICY, demonstrations=True),
        Method("dqc", "dqc", settings=(*OFF_POLICY, "algorithm.n_step=12"), demonstrations=True),
        Method("fql", "fql", settings=OFF_POLICY, demonstrations=True),
        Method("idql", "idql", settings=OFF_POLICY, demonstrations=True),
        Method("rlpd", "rlpd", "squashed_gaussian", OFF_POLICY, demonstrations=True, from_scratch=True),
    )
}
