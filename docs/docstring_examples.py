"""An extension of griffe that shows the examples of docstrings as blocks of code in the site's API reference.

In our docstrings an example is a paragraph that begins with `>>>`. Without a fence Markdown would show it as a
quotation.
"""

import re

import griffe

EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n.+)*")


class Examples(griffe.Extension):
    """Puts each paragraph that begins with `>>>` into a code fence."""

    def on_object(self, *, obj, **kwargs):
        """Changes the docstring of an object when it is read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
