"""An extension of griffe: the examples of docstrings stand in blocks of code in the reference of the site.

In our docstrings an example follows the first sentence as a paragraph that begins with `>>>`. Without a heading of
its own Markdown would take it for a quotation.
"""

import re

import griffe

EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n.+)*")


class Examples(griffe.Extension):
    """Puts each paragraph that begins with `>>>` into a fence."""

    def on_object(self, *, obj, **kwargs):
        """Changes the docstring of an object as soon as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
