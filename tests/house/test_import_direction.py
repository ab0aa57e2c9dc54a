"""Imports point down the floors of the house or sideways without cycles."""

import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

from source_tree import imported_modules, module_name, python_files

FLOORS = {
    "robopolicy.core": 0,
    "robopolicy.nets": 0,
    "robopolicy.policies": 1,
    "robopolicy.critics": 1,
    "robopolicy.sim": 1,
    "robopolicy.data": 1,
    "robopolicy.algorithms": 2,
    "robopolicy.rollout": 2,
    "robopolicy.worldmodel": 2,
    "robopolicy.evaluation": 3,
    "robopolicy.text": 3,
    "robopolicy.training": 3,
    "robopolicy.deploy": 3,
    "robopolicy.teleop": 3,
    "robopolicy.interop": 3,
    "robopolicy.viewer": 3,
    "robopolicy.cli": 4,
    "robopolicy.contrib": 4,
    "robopolicy_tasks": 4,
    "robopolicy_robots": 4,
}
OWN = ("robopolicy", "robopolicy_tasks", "robopolicy_robots")
FOLDERS = ("robopolicy", "tasks", "real_robot")
LOGGERS = ("logging", "rich", "wandb", "tensorboard", "torch.utils.tensorboard", "robopolicy.training")


def package_of(module: str) -> str:
    """The package of the house a module belongs to: `robopolicy.sim` for `robopolicy.sim.chunk.ChunkedSim`."""
    parts = module.split(".")
    return parts[0] if parts[0] != "robopolicy" else ".".join(parts[:2])


def within(module: str, *packages: str) -> bool:
    """Whether `module` is one of `packages` or lies inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(*packages: str) -> list[tuple[str, str, str]]:
    """(where, importing package, imported module) for every import in `packages`."""
    return [
        (f"{path}:{line}", package_of(module_name(path)), target)
        for path in python_files(*FOLDERS)
        if within(module_name(path), *packages)
        for line, target in imported_modules(path)
    ]


def between_packages() -> list[tuple[str, str, str]]:
    """(where, importing package, imported package) for every import that crosses a package border."""
    edges = [(where, source, package_of(target)) for where, source, target in imports(*OWN)]
    return [edge for edge in edges if edge[1] in FLOORS and edge[2] in FLOORS and edge[1] != edge[2]]


def test_every_package_has_a_floor():
    packages = {package_of(module_name(path)) for path in python_files(*FOLDERS) if len(path.parts) > 2}
    homeless = packages - FLOORS.keys()
    assert not homeless, f"Give these packages a floor in FLOORS: {sorted(homeless)}"


def test_imports_point_down():
    upward = [
        f"{where}: {source} (floor {FLOORS[source]}) imports {target} (floor {FLOORS[target]})"
        for where, source, target in between_packages()
        if FLOORS[target] > FLOORS[source]
    ]
    assert not upward, "Imports must point down or sideways:\n" + "\n".join(upward)


def test_packages_of_one_floor_have_no_cycle():
    graph: dict[str, set[str]] = defaultdict(set)
    for _, source, target in between_packages():
        if FLOORS[source] == FLOORS[target]:
            graph[source].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"Packages import each other in a circle: {' -> '.join(error.args[1])}") from None


def test_core_imports_only_torch_ranges_names_and_the_standard_library():
    strangers = [
        f"{where}: {target}"
        for where, _, target in imports("robopolicy.core")
        if not within(target, "robopolicy.core", "robopolicy.constraints", "robopolicy.plugins", "torch")
        and target.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not strangers, (
        "robopolicy.core knows torch, the ranges of numbers, the lookup of names and the standard library only:\n"
        + "\n".join(strangers)
    )


def test_robopolicy_never_imports_tasks_or_robots():
    wrong = [
        f"{where}: {name}"
        for where, _, name in imports("robopolicy")
        if within(name, "robopolicy_tasks", "robopolicy_robots")
    ]
    assert not wrong, "Tasks and robots reach robopolicy through entry points:\n" + "\n".join(wrong)


def test_algorithms_know_no_logger_simulator_or_command_line():
    forbidden = (*LOGGERS, "robopolicy.sim", "robopolicy.cli")
    wrong = [f"{where}: {name}" for where, _, name in imports("robopolicy.algorithms") if within(name, *forbidden)]
    assert not wrong, "Algorithms return metrics and take batches, nothing else:\n" + "\n".join(wrong)


def test_evaluation_never_imports_training():
    wrong = [
        f"{where}: {name}" for where, _, name in imports("robopolicy.evaluation") if within(name, "robopolicy.training")
    ]
    assert not wrong, "A policy is evaluated the same way wherever it comes from:\n" + "\n".join(wrong)


def test_modules_below_the_floors_import_only_each_other():
    modules = [path for path in python_files("robopolicy") if len(path.parts) == 2 and path.stem != "__main__"]
    found = [(f"{path}:{line}", name) for path in modules for line, name in imported_modules(path)]
    own = [module_name(path) for path in modules if path.stem != "__init__"]
    wrong = [f"{where}: {name}" for where, name in found if within(name, *OWN) and not within(name, *own)]
    assert not wrong, "Modules directly under robopolicy/ lie below floor 0:\n" + "\n".join(wrong)
