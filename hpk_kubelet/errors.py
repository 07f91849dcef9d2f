"""The one exception that carries a sentence for the user."""


class HPKError(Exception):
    """Something the user can act on: the message says what, where and what to do.

    The command line prints it as one line and exits 1; the kubelet turns it into an Event.
    Anything else that escapes is a bug.
    """
