from . import doctor as doctor
from . import pictures as pictures
from . import planner as planner
from . import topology as topology
