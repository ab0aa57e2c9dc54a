"""Built-in tasks, one folder a family. Importing this package imports no simulator."""


def register_tasks() -> None:
    """Entry point `robopolicy.tasks`: register every family."""
    from tasks import external, locomotion, manipulation, metaworld, ogbench, push_t, toy, velocity

    external.register()
    locomotion.register()
    toy.register()
    velocity.register()
    manipulation.register()
    metaworld.register()
    ogbench.register()
    push_t.register()
