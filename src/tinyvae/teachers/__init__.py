"""Teachers: the large VAEs of video diffusion models, frozen, read through diffusers."""

from tinyvae.teachers.families import TEACHER_KINDS, TeacherKind
from tinyvae.teachers.latent_space import LatentSpace, draw
from tinyvae.teachers.teacher import Teacher, TeacherError, check_teacher, find_teacher, identify_teacher, load_teacher

__all__ = [
    "TEACHER_KINDS",
    "LatentSpace",
    "Teacher",
    "TeacherError",
    "TeacherKind",
    "check_teacher",
    "draw",
    "find_teacher",
    "identify_teacher",
    "load_teacher",
]
