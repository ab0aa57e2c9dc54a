"""Built-in tasks, one folder a family. Importing this package imports no simulator."""


def register_tasks() -> None:
    """Entry point `robopolicy.tasks`: register every family."""
    from tasks import (
        differentiable,
        external,
        locomotion,
        manipulation,
        metaworld,
        mjlab,
        ogbench,
        push_t,
        text,
        toy,
        velocity,
        volley,
    )

    differentiable.register()
    external.register()
    locomotion.register()
    toy.register()
    manipulation.register()
    metaworld.register()
    mjlab.register()
    ogbench.register()
    push_t.register()
    text.register()
    velocity.register()
    volley.register()
