"""Finds tool calls in an answer, in the forms of several models."""

from mtpbuild.runtime.server.tools.calls import ToolCalls
from mtpbuild.runtime.server.tools.detect import form_of
from mtpbuild.runtime.server.tools.forms import FORMS, Form

__all__ = ["FORMS", "Form", "ToolCalls", "form_of"]
