"""Teachers: the large VAEs of video diffusion models, frozen, read through diffusers."""

from tinyvae.teachers.families import TEACHER_KINDS, TeacherKind
from tinyvae.teachers.teacher import Teacher, TeacherError, check_teacher, find_teacher, load_teacher

__all__ = ["TEACHER_KINDS", "Teacher", "TeacherError", "TeacherKind", "check_teacher", "find_teacher", "load_teacher"]
