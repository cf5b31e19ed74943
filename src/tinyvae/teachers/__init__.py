"""Teachers: the large VAEs of video diffusion models, frozen, read through diffusers.

`check_teacher` at start-up, `load_teacher` when the device is known; the `ReferenceVAE` it gives encodes the frames
of a batch into diffusion space. There is no latent cache: clips are cropped, flipped and cut in time anew at every
step, so a stored latent would hardly ever be asked for twice (docs/teachers.md).
"""

from tinyvae.teachers.diffusers_vae import check_teacher, load_teacher
from tinyvae.teachers.families import TEACHER_KINDS, TeacherKind
from tinyvae.teachers.teacher import ReferenceVAE, TeacherError

__all__ = ["TEACHER_KINDS", "ReferenceVAE", "TeacherError", "TeacherKind", "check_teacher", "load_teacher"]
