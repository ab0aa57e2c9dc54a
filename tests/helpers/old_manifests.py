"""Manifests with the settings of older versions."""

from typing import Any


def as_of_old(config: dict[str, Any], cells: int) -> dict[str, Any]:
    """The config of a head in the earlier format."""
    old = {key: value for key, value in config.items() if key not in ("encoders", "backbone_options")}
    options = {"modules": 8, "context_width": 64} | config["backbone_options"]
    old |= {"entities": {"width": 64, "heads": 4, "layers": 1, "features": 64} | config["encoders"].get("entities", {})}
    old |= {"modular_count": options["modules"], "modular_context": options["context_width"]}
    vision = {key: value for key, value in config["vision"].items() if key != "augmentation"}
    return old | {"vision": vision | {"noise_mask": cells}}
