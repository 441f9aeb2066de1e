"""Whether the request path runs as extension modules; which modules those are says `bin/compiled/form.py`."""

from conf import log

# One of them stands for all: they are made together.
IS_COMPILED = not str(log.__file__).endswith(".py")
