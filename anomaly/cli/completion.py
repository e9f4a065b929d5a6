"""`anomaly completion`: lets bash and zsh complete commands, options and file names."""

from __future__ import annotations

import argparse

from anomaly.cli import options_of
from anomaly.cli.help import COMMANDS

_SCRIPT = """\
# In ~/.bashrc or ~/.zshrc:  eval "$(anomaly completion)"
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X bashcompinit && bashcompinit; }}
_anomaly() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  elif [ "${{word#-}}" != "$word" ]; then
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _anomaly anomaly
"""


def run(options: argparse.Namespace) -> int:
    """Print a shell script that completes commands and options."""
    cases = [f'      {name}) words="{" ".join(options_of(name))}" ;;' for name in COMMANDS]
    print(_SCRIPT.format(commands=" ".join(COMMANDS), options="\n".join(cases)), end="")
    return 0
