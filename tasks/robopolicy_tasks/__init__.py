"""Built-in tasks, one folder per family. Importing this package imports no simulator."""


def register_tasks() -> None:
    """Register every family (entry point `robopolicy.tasks`)."""
    from robopolicy_tasks import (
        dm_control,
        external,
        locomotion,
        manipulation,
        metaworld,
        mjlab,
        ogbench,
        push_t,
        robosuite,
        text,
        toy,
        velocity,
    )

    families = (dm_control, external, locomotion, toy, manipulation, metaworld, mjlab, ogbench, push_t, robosuite)
    for family in (*families, text, velocity):
        family.register()
