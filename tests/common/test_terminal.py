"""Text of unknown origin on a terminal."""

from problems.common import terminal


def test_text_from_elsewhere_cannot_steer_the_terminal():
    assert terminal.visible("a\x1b[2Jb\u202ec\td\ne é\u2028") == "a\\x1b[2Jb\\u202ec\td\ne é\\u2028"
