"""`tokenmill completion`: the script that lets a shell complete verbs, flags and values. Owns: one script per shell.

The scripts ask the command itself what can follow (typer answers). If it has no suggestion, files are offered.
"""

from __future__ import annotations

import sys
from typing import Literal

import typer

Shell = Literal["bash", "zsh", "fish"]
VARIABLE = "_TOKENMILL_COMPLETE"
SCRIPTS = {
    "bash": """\
_tokenmill() {
    local IFS=$'\\n'
    COMPREPLY=($(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" VARIABLE=complete_bash "$1" 2>/dev/null))
}
complete -o default -F _tokenmill tokenmill""",
    "zsh": """\
#compdef tokenmill
_tokenmill() {
    local found
    found=$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" VARIABLE=complete_zsh tokenmill 2>/dev/null)
    [[ -n $found ]] && eval "$found" || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _tokenmill tokenmill""",
    "fish": """\
function _tokenmill_ask
    env VARIABLE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] _TYPER_COMPLETE_ARGS=(commandline -cp) \
tokenmill 2>/dev/null
end
complete --command tokenmill --no-files --arguments '(_tokenmill_ask get-args)' --condition '_tokenmill_ask is-args'""",
}
WHERE = {
    "bash": "add `source <(tokenmill completion bash)` to ~/.bashrc",
    "zsh": "add `source <(tokenmill completion zsh)` to ~/.zshrc",
    "fish": "tokenmill completion fish > ~/.config/fish/completions/tokenmill.fish",
}


def completion(shell: Shell = typer.Argument(..., metavar="bash|zsh|fish", help="The shell.")) -> None:
    """Print the script that lets a shell complete verbs, flags and values."""
    print(SCRIPTS[shell].replace("VARIABLE", VARIABLE))
    if sys.stdout.isatty():
        typer.secho(f"# To have it always: {WHERE[shell]}", dim=True, err=True)
