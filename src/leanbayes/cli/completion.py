"""`leanbayes completion SHELL`: print a script that completes commands, methods and flags."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from leanbayes.cli.options import parse
from leanbayes.methods import METHODS

_FLAG = re.compile(r"--[a-z][a-z0-9.-]*")
_SCRIPT = """# Completion of leanbayes for {shell}.
{start}_leanbayes() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" flags=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  if [ "$COMP_CWORD" -eq 2 ] && [ "$command" = fit ] && [ "${{word#-}}" = "$word" ]; then
    COMPREPLY=($(compgen -W "{methods}" -- "$word"))
    return
  fi
  case "$command ${{COMP_WORDS[2]}}" in
{cases}
  esac
  if [ "${{word#-}}" != "$word" ]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [ "$command" = compare ]; then
    COMPREPLY=($(compgen -W "{methods}" -- "$word") $(compgen -f -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _leanbayes leanbayes
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that lets a shell complete commands, methods and flags.

    For bash: leanbayes completion bash > ~/.local/share/bash-completion/completions/leanbayes. For zsh: add the line
    source <(leanbayes completion zsh) to ~/.zshrc.

    Attributes:
        shell: the shell.
        json: print the words as JSON instead of a script.
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional] = "bash"
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(CompletionOptions, words, "completion")
    return lambda: _complete(options)


def _complete(options: CompletionOptions) -> None:
    from leanbayes.cli.main import COMMANDS
    from leanbayes.core.json_values import json_text

    flags = {name: _flags(name) for name in COMMANDS if name != "fit"}
    of_methods = {method: _flags("fit", method) for method in METHODS}
    if options.json:
        print(json_text({**flags, "fit": of_methods}))
        return
    cases = {f'"fit {method}"': words for method, words in of_methods.items()}
    cases |= {f'"{name} "*': words for name, words in flags.items()}
    text = _SCRIPT.format(
        shell=options.shell,
        start=_ZSH if options.shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        methods=" ".join(METHODS),
        cases="\n".join(f'    {case}) flags="{" ".join(words)}" ;;' for case, words in cases.items()),
    )
    print(text, end="")


def _flags(name: str, *words: str) -> list[str]:
    """Return the flags that the help of a command lists."""
    import importlib

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        importlib.import_module(f"leanbayes.cli.{name}").command([*words, "--help"])
    return sorted({flag.rstrip(".-") for flag in _FLAG.findall(text.getvalue())})
