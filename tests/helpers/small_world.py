"""A minimal world model, and runs that train one in seconds."""

from pathlib import Path
from typing import Any

from films import push_films

from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.training.config import LoggingConfig
from robopolicy.training.model_runs import WorldEvaluationConfig, WorldTrainConfig
from robopolicy.worldmodel.latent import LatentWorldModel, LatentWorldModelConfig
from robopolicy.worldmodel.learner import LearnerConfig
from robopolicy.worldmodel.videos import VideoDataset, infer_spec

CONFIG = LatentWorldModelConfig(autoencoder_width=8, latent_channels=4, width=16, blocks=1, decoder_width=64, rows=4)


def small_films(episodes: int = 8, **options: Any) -> VideoDataset:
    """Videos of 16 x 16 pixels."""
    found = push_films(episodes, size=16, **options)
    return VideoDataset(infer_spec(found), found)


def small_world(films: VideoDataset, config: LatentWorldModelConfig = CONFIG) -> LatentWorldModel:
    """An untrained world model of the videos."""
    return LatentWorldModel(config, films.spec).eval()


def small_run(out: Path, *, episodes: int = 8, **learner: Any) -> WorldTrainConfig:
    """Configuration of a run of a few updates; writes its dataset."""
    write_lerobot(push_films(episodes, size=16), out / "films", video=False, overwrite=True)
    budget = {"autoencoder_updates": 6, "updates": 6, "batch_size": 8, "autoencoder_batch": 4} | learner
    return WorldTrainConfig(
        dataset=str(out / "films"),
        model=CONFIG,
        learner=LearnerConfig(**budget),
        evaluation=WorldEvaluationConfig(every=6, windows=4, horizon=3),
        logging=LoggingConfig(every=1),
        checkpoint_every=4,
        out=str(out),
        name="run",
    )
