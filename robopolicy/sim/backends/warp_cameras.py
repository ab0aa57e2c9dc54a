"""Camera observations of many worlds by MuJoCo Warp's ray tracer, on the device of the physics.

The scene is that of the native `Renderer`: the same cameras, lights, headlight, materials and sky, without shadows.
Unlike OpenGL, a texture is not blurred with distance, transparent geoms are opaque, and sites are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import unknown_name
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.sim.contract import Observation
from robopolicy.sim.point_cloud import DEPTH_SIZE, unproject

_DRAWN_GROUPS = [0, 1, 2]  # of geoms, as in `mujoco.MjvOption`


class WarpCameras:
    """Images and point clouds of `num_worlds` worlds of one task.

    It has its own model and positions, so that it neither reads nor changes the physics: `views` receives states.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_worlds: int,
        device: torch.device,
        capture: Callable[[Callable[[], None]], Callable[[], None]],  # records work on `device`; the result repeats it
        *,
        cameras: Sequence[str],  # for observations `image.<camera>`
        image_size: int,  # height and width in pixels
        point_clouds: Sequence[str],  # for observations `point_cloud.<camera>`
        points: int,  # of each cloud
    ) -> None:
        import mujoco_warp
        import warp

        for camera in (*cameras, *point_clouds):
            if camera not in task.cameras:
                raise unknown_name("camera", camera, task.cameras, f"of task {task.name}")
        self._images: dict[str, Tensor] = {}  # views of packed colours (N, size, size, 4): blue, green, red, alpha
        self._clouds: dict[str, Tensor] = {}  # views of (N, points, 3)
        model = copy(task.model)
        painted, alpha = model.geom_matid >= 0, model.geom_rgba[:, 3].copy()
        alpha[painted] = model.mat_rgba[model.geom_matid[painted], 3]
        model.geom_group[alpha == 0] = mujoco.mjNGROUP - 1  # a group that is not drawn
        with warp.ScopedDevice(str(device)):
            on_device = mujoco_warp.put_model(model)
            data = mujoco_warp.make_data(model, nworld=num_worlds, nconmax=1, njmax=1)
            self._qpos: Tensor = warp.to_torch(data.qpos)
            work: list[Callable[[], Any]] = []

            def tracer(names: Sequence[str], size: int, *, depth: bool) -> Any:
                """Ray tracer of the cameras `names`, in the order of the model."""
                context = mujoco_warp.create_render_context(
                    model,
                    num_worlds,
                    cam_res=(size, size),
                    render_rgb=not depth,
                    render_depth=depth,
                    render_seg=False,
                    cam_active=[model.camera(i).name in names for i in range(model.ncam)],
                    enabled_geom_groups=_DRAWN_GROUPS,
                    render_skybox=True,
                )
                work.append(lambda: mujoco_warp.refit_bvh(on_device, data, context))
                work.append(lambda: mujoco_warp.render(on_device, data, context))
                return context

            if cameras:
                colours = warp.to_torch(tracer(cameras, image_size, depth=False).rgb_data).view(torch.uint8)
                frames = colours.view(num_worlds, -1, image_size, image_size, 4).unbind(1)
                self._images = dict(zip(_in_model_order(model, cameras), frames, strict=True))
            if point_clouds:
                names = _in_model_order(model, point_clouds)
                depths = tracer(point_clouds, DEPTH_SIZE, depth=True).depth_data
                pixels = DEPTH_SIZE**2
                for k, name in enumerate(names):
                    depth = depths[:, k * pixels : (k + 1) * pixels]
                    select, chosen = _selection(task, model.camera(name), depth, data, points)
                    work.append(select)
                    self._clouds[name] = warp.to_torch(chosen)

            def trace() -> None:
                mujoco_warp.kinematics(on_device, data)
                mujoco_warp.com_pos(on_device, data)  # for cameras that follow a centre of mass
                mujoco_warp.camlight(on_device, data)
                for run in work:
                    run()

            self._trace = trace  # keeps the memory that the record uses
            self._draw = capture(trace)

    def views(self, qpos: Tensor) -> Observation:
        """Render K states `qpos` `(K, nq)`, K at most the number of worlds: images `(K, 3, size, size)`, clouds."""
        count = len(qpos)
        self._qpos[:count] = qpos
        self._draw()
        images = {
            IMAGE_PREFIX + camera: frame[:count, ..., :3].flip(-1).permute(0, 3, 1, 2).contiguous()
            for camera, frame in self._images.items()
        }
        return images | {CLOUD_PREFIX + camera: cloud[:count].clone() for camera, cloud in self._clouds.items()}


def _in_model_order(model: mujoco.MjModel, names: Sequence[str]) -> list[str]:
    return [name for name in (model.camera(i).name for i in range(model.ncam)) if name in names]


def _selection(task: MujocoTask, camera: Any, depth: Any, data: Any, count: int) -> tuple[Callable[[], Any], Any]:
    """Return a launch that selects points from depth images `(N, pixels)`, and its result `(N, count)`."""
    import warp

    from robopolicy.sim.backends.warp_points import BLOCK, select_points

    worlds, pixels = depth.shape
    rays = unproject(np.ones((DEPTH_SIZE, DEPTH_SIZE)), float(camera.fovy[0]), np.zeros(3), np.eye(3))
    low, high = task.workspace or (np.full(3, -np.inf), np.full(3, np.inf))
    chosen = warp.zeros((worlds, count), dtype=warp.vec3)
    inputs = [depth, warp.array(rays, dtype=warp.vec3), int(camera.id), data.cam_xpos, data.cam_xmat]
    inputs += [warp.vec3(*low), warp.vec3(*high)]
    inputs += [warp.zeros((worlds, pixels), dtype=warp.vec3), warp.zeros((worlds, pixels), dtype=float)]
    return lambda: warp.launch_tiled(select_points, dim=[worlds], inputs=[*inputs, chosen], block_dim=BLOCK), chosen
