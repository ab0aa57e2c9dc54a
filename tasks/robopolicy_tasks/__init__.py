"""Built-in tasks, one folder per family. Importing this package imports no simulator."""


def register_tasks() -> None:
    """Entry point `robopolicy.tasks`: register every family."""
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

    dm_control.register()
    external.register()
    locomotion.register()
    toy.register()
    manipulation.register()
    metaworld.register()
    mjlab.register()
    ogbench.register()
    push_t.register()
    robosuite.register()
    text.register()
    velocity.register()
