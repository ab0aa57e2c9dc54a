"""Kernels of the warp backend. Importing this module imports Warp, which reads the annotations at once."""
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAssignmentType=false

import warp as wp


@wp.kernel(enable_backward=False)
def copy_columns(
    source: wp.array2d[wp.float32],
    target: wp.array2d[wp.float32],
):
    """Copy `source` `(N, D)` to `target` `(N, D)`; a row of either may be part of a longer one."""
    row, column = wp.tid()
    target[row, column] = source[row, column]
