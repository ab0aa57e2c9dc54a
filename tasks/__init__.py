"""Built-in tasks, one folder a family. Importing this package imports no simulator."""


def register_tasks() -> None:
    """Entry point `robopolicy.tasks`: register every family."""
    from tasks import manipulation, toy

    toy.register()
    manipulation.register()
