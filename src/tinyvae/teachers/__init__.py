"""Teachers: the large VAEs of video diffusion models, frozen, read through diffusers.

`check_teacher` at the start, `load_teacher` when the device is known; the `Teacher` it gives encodes the frames of a
batch into diffusion space. There is no latent cache (docs/teachers.md says why).
"""

from tinyvae.teachers.families import TEACHER_KINDS, TeacherKind
from tinyvae.teachers.teacher import Teacher, TeacherError, check_teacher, find_teacher, load_teacher

__all__ = ["TEACHER_KINDS", "Teacher", "TeacherError", "TeacherKind", "check_teacher", "find_teacher", "load_teacher"]
