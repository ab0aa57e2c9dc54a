"""Conversion of policies from and to LeRobot; `robopolicy.data.formats.lerobot` reads and writes its datasets.

    policy = loading.load_lerobot("lerobot/diffusion_pusht")  # or a folder; act and decode, field where it diffuses
    theirs = adapter.as_lerobot(policy)  # select_action, predict_action_chunk

Tested with the releases that the extra `robopolicy[lerobot]` allows. Nothing here imports `lerobot` before it is used.
"""
