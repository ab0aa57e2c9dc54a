"""Tests of world models in use: judges by name, ensembles, searches and fine-tuning checked by the simulator."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
from films import push_films
from push_worlds import folder, world

from robopolicy.algorithms.bc import BCConfig
from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.errors import UserError
from robopolicy.policies.heads.flow import FlowConfig
from robopolicy.schema import from_dict, to_dict
from robopolicy.sim.registry import SimOptions, WorldOptions, make_sim
from robopolicy.training.build import resolve_config
from robopolicy.training.config import BudgetConfig, TrainConfig
from robopolicy.training.world_sims import load_world, load_worlds, save_world
from robopolicy.worldmodel.latent import EnsembleWorldModel, LatentWorldModel
from robopolicy.worldmodel.success_detectors.classifier import StateProbe, SuccessClassifier
from robopolicy.worldmodel.success_detectors.clips import Examples

__all__ = ["folder"]  # a fixture
NO = "SUCCESS: no\nPROGRESS: 25"


@pytest.mark.parametrize("kind", ["classifier", "probe"])
def test_judges_are_trained_evaluated_and_loaded_by_folder(folder, kind, capsys):
    judge, model = str(folder / kind), str(folder / "world0")
    size = ["--steps", "3", "--members", "2", "--frames", "2", "--kind", kind]
    assert main(["worldmodel", "judge", model, str(folder / "films"), *size, "--out", judge, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["frames"]) == {"as filmed", "as reconstructed"} and found["episodes"]
    sim = world(folder, judge=judge)
    assert type(sim.judge) is {"classifier": SuccessClassifier, "probe": StateProbe}[kind]
    assert sim.config.clip == 2 and sim.config.success == found["threshold"]
    words = ["--backend", f"worldmodel:{model}", "--judge", judge, "--episodes", "2", "--video", "0"]
    out = ["--out", str(folder / f"eval_{kind}"), "--json"]
    assert main(["eval", "random", "--task", "push", *words, *out]) == 0
    ranked = ["random", "expert", "--judge", judge, "--episodes", "2", "--video", "0", "--json"]
    assert main(["worldmodel", "rank", model, *ranked, "--out", str(folder / f"rank_{kind}")]) == 0


def test_a_judge_is_measured_on_episodes_that_did_not_calibrate_it(folder, monkeypatch):
    used: dict[str, set[int]] = {}

    def watch(module: str, name: str) -> None:
        function = getattr(importlib.import_module(module), name)

        def watched(*arguments, **options):
            for index, each in enumerate(arguments):
                if isinstance(each, Examples):
                    used[f"{name} {index}"] = set(each.videos.episodes.seeds.tolist())
            return function(*arguments, **options)

        monkeypatch.setattr(f"{module}.{name}", watched)

    watch("robopolicy.worldmodel.success_detectors.classifier", "fit_classifier")
    for name in ("frame_confusions", "episode_confusions"):
        watch("robopolicy.evaluation.judge_metrics", name)
    films = folder / "films_of_forty"
    write_lerobot(push_films(40, size=16), films, video=False)
    words = [str(folder / "world0"), str(films), "--steps", "1", "--members", "1", "--out", str(folder / "split")]
    assert main(["worldmodel", "judge", *words]) == 0
    train, calibration = used["fit_classifier 0"], used["fit_classifier 1"]
    measurement = used["frame_confusions 1"]
    assert (len(train), len(calibration), len(measurement)) == (32, 4, 4)
    assert len(train | calibration | measurement) == 40 and used["episode_confusions 1"] == measurement


def test_too_few_episodes_to_calibrate_and_measure_a_judge_are_refused(folder, refused):
    write_lerobot(push_films(8, size=16).subset([0, 1, 6, 7]), folder / "few", video=False)
    words = [str(folder / "world0"), str(folder / "few"), "--out", str(folder / "none")]
    assert "A judge needs more than 4 episodes for calibration" in refused("worldmodel", "judge", *words)


def test_vision_language_judge_receives_every_twentieth_frame(folder, monkeypatch):
    shown: list[int] = []

    class Watching:
        def __init__(self, url: str, model: str, **options) -> None:
            assert (url, model) == ("http://127.0.0.1:1/v1", "name")

        def __call__(self, prompt, frames, seed) -> str:
            shown.append(len(frames))
            return NO

    monkeypatch.setattr("robopolicy.training.world_sims.ServedVLM", Watching)
    sim = world(folder, judge="vlm:name@http://127.0.0.1:1/v1", steps=25)
    sim.reset(0)
    done = [sim.step(torch.zeros(3, 2)) for _ in range(25)]
    assert shown == [2] * 15 + [3] * 15  # five votes on three rows: frames 0 and 20, then 0, 20 and 25
    assert float(done[19].info["progress"][0]) == 0.25 and bool(done[-1].truncated.all())


def test_ensemble_is_uncertain_only_if_its_members_differ(folder):
    model, _ = load_worlds(f"{folder / 'world0'},{folder / 'world1'}")
    assert isinstance(model, EnsembleWorldModel)
    for member in model.members:
        assert isinstance(member, LatentWorldModel)
        torch.nn.init.normal_(member.denoiser.out.weight, std=0.3)
    sim = world(folder, "world0,world1")
    start = sim.starts([4, 5])
    state = model.reset(start.images, start.proprio, seeds=torch.tensor([4, 5]))
    after, frames = model.step(state, torch.ones(2, 3, 2))
    for row, member in enumerate(model.members):  # seed 4 uses the first member, seed 5 the second
        alone = member.reset(start.images, start.proprio, seeds=torch.tensor([4, 5]))
        assert torch.equal(member.step(alone, torch.ones(2, 3, 2))[1].images["top"][row], frames.images["top"][row])
    assert bool((frames.uncertainty > 0).all()) and after.steps.tolist() == [3, 3]
    twins = EnsembleWorldModel([model.members[0]] * 2)
    state = twins.reset(start.images, start.proprio, seeds=state.seeds)
    assert not twins.step(state, torch.ones(2, 3, 2))[1].uncertainty.any()


def test_short_rollouts_start_within_videos_and_end_on_disagreement(folder):
    sim = world(folder, "world0,world1", films=str(folder / "films"), steps=5, max_uncertainty=1e-9, penalty=2.0)
    sim.reset(0)
    step = sim.step(torch.zeros(3, 2))
    assert bool(step.truncated.all()) and bool((step.reward == -2 * step.info["uncertainty"]).all())
    longer = world(folder, films=str(folder / "films"), steps=5)
    obs = longer.reset(0)
    assert [bool(longer.step(torch.zeros(3, 2)).truncated.any()) for _ in range(5)] == [False] * 4 + [True]
    assert not torch.equal(obs["block"], make_sim("push", SimOptions(num_envs=3)).reset(0)["block"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"penalty": 1.0}, "Uncertainty requires several predictions"),
        ({"judge": "nowhere"}, "not a complete judge"),
        ({"support": "nowhere"}, "No LeRobot dataset at nowhere"),
    ],
)
def test_invalid_settings_are_refused(folder, settings, message):
    with pytest.raises(UserError, match=message):
        world(folder, **settings)


def test_a_model_of_a_task_without_success_is_refused_but_tested(folder, capsys, refused):
    model, manifest = load_world(folder / "world0")
    cheetah, films = str(folder / "cheetah"), str(folder / "films")
    save_world(folder / "cheetah", model, replace(manifest, task="locomotion/half_cheetah"))
    task = ["--task", "half_cheetah", "--out", str(folder / "no")]
    message = "half_cheetah has no success, only returns, and a world model predicts neither rewards nor returns"
    assert message in refused("eval", "random", *task, "--backend", f"worldmodel:{cheetah}", "--video", "0")
    assert message in refused("eval", str(folder / "policy0"), *task, "--plan-with", cheetah)
    assert message in refused("worldmodel", "rank", cheetah, "random", "--out", folder / "no")
    assert main(["worldmodel", "eval", cheetah, films, "--windows", "4", "--horizon", "3", "--json"]) == 0
    assert "psnr" in json.loads(capsys.readouterr().out)


def test_a_model_of_videos_without_success_needs_a_judge(folder, monkeypatch):
    model, manifest = load_world(folder / "world0")
    save_world(folder / "unlabelled", model, replace(manifest, training={"failures": None}))
    with pytest.raises(UserError, match="record no success, so that it predicts neither success nor return"):
        world(folder, "unlabelled")
    monkeypatch.setattr("robopolicy.training.world_sims.ServedVLM", lambda url, model: lambda *request: NO)
    assert world(folder, "unlabelled", judge="vlm:name@http://127.0.0.1:1/v1").spec.task == "toy/push"


def test_a_judge_without_a_world_model_is_refused(folder, refused):
    assert "need --backend worldmodel:FOLDER" in refused(
        "eval", "random", "--task", "push", "--judge", "x", "--out", folder / "no"
    )
    settings = TrainConfig(
        policy={**to_dict(FlowConfig()), "name": "flow"},
        algorithm={**to_dict(BCConfig()), "name": "bc"},
        budget=BudgetConfig(updates=1),
        worldmodel=WorldOptions(steps=3),
    )
    with pytest.raises(UserError, match=r"Settings of worldmodel\.\* need a world model"):
        resolve_config(settings)
    plain = to_dict(settings)
    plain["worldmodel"]["penalty"] = -1.0
    with pytest.raises(UserError, match=r"worldmodel\.penalty must not be negative, got -1\.0"):
        from_dict(TrainConfig, plain, "")


def test_weights_searched_in_a_world_model_are_evaluated_in_the_simulator(folder, capsys):
    policies = [str(folder / name) for name in ("policy0", "policy1")]
    search = ["--search", "grid", "--divisions", "2", "--episodes", "3", "--report-episodes", "4"]
    backend = ["--backend", f"worldmodel:{folder / 'world0'}"]
    assert main(["compose", *policies, *search, *backend, "--out", str(folder / "both"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["results"]) == set(found["predicted"]) and len(found["results"]) == 3
    report = json.loads((folder / "both" / "report" / "report.json").read_text())
    assert report["predicted"] == found["predicted"]
    searched = [json.loads(line) for line in (folder / "both" / "search.jsonl").read_text().splitlines()[1:]]
    assert sum(row["who"].endswith("in the world model") for row in searched) == 3
    real = next(row["result"] for row in searched if row["who"] == "policy use0/policy0" or "policy0" in row["who"])
    words = [policies[0], "--episodes", "4", "--seed", "30000", "--video", "0", "--out", str(folder / "own"), "--json"]
    assert main(["eval", *words]) == 0
    evaluated = json.loads(capsys.readouterr().out)["results"]
    assert next(iter(evaluated.values()))["success"] == rate(real)


def rate(result: dict) -> float:
    """Success rate of a recorded result."""
    return sum(result["episodes"]["success"]) / len(result["episodes"]["success"])


def test_fine_tuning_in_a_world_model_is_evaluated_in_the_simulator(folder, capsys):
    algorithm = ["algorithm=reinflow", "algorithm.num_steps=4", "algorithm.epochs=1", "algorithm.batch_size=16"]
    settings = ["sim.num_envs=4", "worldmodel.samples=2", "worldmodel.penalty=0.1", "worldmodel.steps=6"]
    settings += ["budget.updates=2"]
    place = [f"worldmodel.films={folder / 'films'}", f"sim.backend=worldmodel:{folder / 'world0'}", f"out={folder}"]
    rest = ["evaluation.episodes=4", "evaluation.every=2", f"init_from={folder / 'policy0'}", "name=tuned"]
    assert main(["train", *algorithm, *settings, *place, *rest]) == 0
    capsys.readouterr()
    found = json.loads((folder / "tuned" / "report.json").read_text())["final"]
    words = ["--episodes", "4", "--video", "0", "--out", str(folder / "check"), "--json"]
    assert main(["eval", str(folder / "tuned" / "checkpoints" / "last"), *words]) == 0
    (real,) = json.loads(capsys.readouterr().out)["results"].values()
    assert found["success"] == real["success"]  # from the simulator; the untrained model predicts no success
    rows = [json.loads(row) for row in (folder / "tuned" / "metrics.jsonl").read_text().splitlines()]
    lengths = [row[key] for row in rows for key in row if "length" in key and "eval" not in key]
    assert lengths and max(lengths) <= 6
