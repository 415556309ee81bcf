"""``vtok completion``: scripts that complete commands, made from the options of the verbs."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Literal, get_args, get_origin, get_type_hints

from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import unknown

SHELLS = ("bash", "zsh", "fish")
# Values of options that are text. Options of other types, paths and --data need no entry here.
WORDS: dict[str, tuple[str, ...]] = {
    "augment": ("none", "digits", "photo", "imagenet", "cifar", "coco", "ade20k", "multiscale"),
    "device": ("auto", "cpu", "cuda", "mps"),
    "from_": ("paca", "stvit", "deit", "pvt_v2", "swin", "torchvision"),
    "license": ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "cc0-1.0", "other"),
    "log": ("tensorboard", "trackio", "wandb"),
    "method": (
        *("kmeans", "weighted_kmeans", "kmedoids", "weighted_kmedoids", "power_bert", "importance", "random"),
        *("merge", "weighted_merge", "conv"),
    ),
    "optimizer": ("adamw", "nesterov", "rmsproptf", "lamb"),
    "paper": ("paca-vit", "stvit", "token-pooling", "visual-transformers"),
    "shell": SHELLS,
    "task": ("classify", "segment", "detect"),
}
MODEL_OPTIONS = ("model", "models", "against", "filter")
# Models to train besides the backbones.
HEADS = ("fpn", "vt_fpn", "upernet", "faster_rcnn", "mask_rcnn", "cascade_mask_rcnn", "retinanet")
BUILT_IN_DATA = ("digits", "digit_scenes")
Kind = Literal["none", "words", "file", "folder", "data"]


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Print a script that completes verbs, options, their values, files and datasets."""

    shell: str
    """Shell: bash, zsh or fish. For bash and zsh, add `source <(vtok completion bash)` to ~/.bashrc or
    ~/.zshrc; for fish, save the script as ~/.config/fish/completions/vtok.fish."""


@dataclass(frozen=True)
class Option:
    """How the value of one option, or of a positional argument, is completed."""

    name: str  # as typed, such as --lr; empty for a positional argument
    about: str
    kind: Kind = "none"
    words: tuple[str, ...] = ()
    flag: bool = False  # takes no value
    nested: bool = False  # takes names of its own, such as --model_args.drop_rate


def run(config: CompletionConfig) -> Result:
    """Return the script."""
    writers = {"bash": bash, "zsh": zsh, "fish": fish}
    if config.shell not in writers:
        raise unknown("shell", config.shell, SHELLS)
    script = writers[config.shell](all_options())
    return Result(script, {"shell": config.shell, "script": script})


# What can be completed.

COMMON = (
    Option("--json", "Print the result as one JSON document.", flag=True),
    Option("--config", "YAML file with options.", "file"),
    Option("--print_config", "Print all options as YAML.", flag=True),
    Option("--help", "Describe the options.", flag=True),
)


def all_options() -> dict[str, list[Option]]:
    """Return the options of every verb, its positional argument first."""
    from visualtokens.cli.app import VERBS

    return {name: [*_options(name), *COMMON] for name in VERBS}


def _options(name: str) -> Iterator[Option]:
    from visualtokens.cli.parse import descriptions, grouped_fields

    verb: Verb = importlib.import_module(f"visualtokens.cli.{name}").VERB
    types, described = get_type_hints(verb.config), descriptions(verb.config)
    fields = [field for group in grouped_fields(verb).values() for field in group]
    for field in sorted(fields, key=lambda field: field.name not in verb.positionals):
        yield _option(
            field, types[field.name], described[field.name], positional=field.name in verb.positionals
        )


def _option(field: dataclasses.Field[Any], hint: Any, description: str, *, positional: bool) -> Option:
    name = "" if positional else "--" + field.name.removesuffix("_")
    about = re.split(r"[.;:](?=\s|$)", description)[0]
    kinds = {get_origin(each) or each for each in (hint, *get_args(hint))}
    if hint is bool:
        return Option(name, about, flag=True)
    words = _words(field.name, hint)
    if field.name == "model":
        words += tuple(head for head in HEADS if re.search(rf"\b{head}\b", description))
    if field.name == "data":
        return Option(name, about, "data", _kinds_of_data(description))
    nested = get_origin(hint) is dict
    if (
        str in kinds
        and not nested
        and re.search(r"\bfiles?\b", description.partition(". ")[0], re.IGNORECASE)
    ):
        return Option(name, about, "file", words)
    if str in kinds and re.search(r"\bfolder\b", description.partition(". ")[0], re.IGNORECASE):
        return Option(name, about, "folder", words)
    return Option(name, about, "words" if words else "none", words, nested=nested)


def _words(name: str, hint: Any) -> tuple[str, ...]:
    """Return the values to suggest."""
    for each in (hint, *get_args(hint)):
        if get_origin(each) is Literal:
            return tuple(map(str, get_args(each)))
    if name == "verb":
        from visualtokens.cli.app import VERBS

        return tuple(VERBS)
    if name in MODEL_OPTIONS:
        from visualtokens.cli.models import read_sizes

        return tuple(read_sizes())
    return WORDS.get(name, ())


def _kinds_of_data(description: str) -> tuple[str, ...]:
    """Return the datasets that the help of --data names; those that need a path end with a colon."""
    built_in = [name for name in BUILT_IN_DATA if re.search(rf"\b{name}\b", description)]
    return tuple(dict.fromkeys([*built_in, *re.findall(r"\b([a-z]\w*:)(?=[A-Z]{2})", description)]))


# Scripts.

BASH = r"""# Completes vtok in bash; add this line to ~/.bashrc: source <(vtok completion bash)
_vtok() {
    local current=${COMP_WORDS[COMP_CWORD]} i=$COMP_CWORD kind=words words= options= prefix= option found
    COMPREPLY=()
    if (( i == 1 )); then
        COMPREPLY=($(compgen -W '@VERBS@ --help --version' -- "$current"))
        return
    fi
    # Find the option that the value belongs to. Bash splits the line at = and : as well.
    if [[ $current == [=:] ]]; then current=; else (( i-- )); fi
    while [[ ${COMP_WORDS[i]} == : ]]; do prefix=: && (( i -= 2 )); done
    [[ ${COMP_WORDS[i]} == = ]] && (( i-- ))
    option=${COMP_WORDS[i]}
    case ${COMP_WORDS[1]} in
@CASES@
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
        [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == *. ]] && compopt -o nospace 2> /dev/null
        return
    fi
    if [[ $kind == data && $prefix ]]; then
        kind=file words= prefix=
    elif [[ $kind == data && $current == *:* ]]; then  # where bash does not split at :
        kind=file words= prefix=${current%%:*}: current=${current#*:}
    elif [[ $kind == data ]]; then
        compopt -o nospace 2> /dev/null
    fi
    [[ $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $kind == file || $kind == folder ]]; then
        [[ $kind == file ]] && kind=-f || kind=-d
        while IFS= read -r found; do
            COMPREPLY+=("$prefix$found")
        done < <(compgen $kind -- "${current//\\/}")
        compopt -o filenames 2> /dev/null
    fi
}
complete -F _vtok vtok
"""


def bash(verbs: dict[str, list[Option]]) -> str:
    """Return the script for bash."""
    cases = []
    for verb, options in verbs.items():
        names = [f"{o.name}." if o.nested else o.name for o in options if o.name]
        cases += [f"    {verb})", f"        options={quote(' '.join(names))}", "        case $option in"]
        valued = [option for option in options if not option.flag]
        for (kind, words), group in _grouped(option for option in valued if option.name).items():
            values = f" words={quote(' '.join(words))}" if words else ""
            cases.append(f"        {'|'.join(group)}) kind={kind}{values} ;;")
        for option in valued:
            if not option.name:
                values = f" words={quote(' '.join(option.words))}" if option.words else ""
                cases.append(f"        *) kind={option.kind}{values} ;;")
        cases += ["        esac", "        ;;"]
    return BASH.replace("@VERBS@", " ".join(verbs)).replace("@CASES@", "\n".join(cases)).rstrip("\n")


def _grouped(options: Iterator[Option]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Return the names of the options that are completed in the same way."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for option in options:
        groups.setdefault((option.kind, option.words), []).append(option.name)
    return groups


ZSH = r"""#compdef vtok
# Completes vtok in zsh; add this line to ~/.zshrc, below compinit: source <(vtok completion zsh)
_vtok_data() {
    if compset -P '*:'; then
        _files
    else
        compadd -S '' -- "$@"
    fi
}
_vtok() {
    local context state line
    typeset -A opt_args
    _arguments -C '1:verb:((@VERBS@))' '*::argument:->arguments' && return
    [[ $state == arguments ]] || return
    case $words[1] in
@CASES@
    esac
}
compdef _vtok vtok
"""


def zsh(verbs: dict[str, list[Option]]) -> str:
    """Return the script for zsh."""
    from visualtokens.cli.app import VERBS

    cases = []
    for verb, options in verbs.items():
        cases.append(f"    {verb})")
        lines = [f"        {quote(_zsh_spec(option))}" for option in options]
        cases.append("        _arguments \\\n" + " \\\n".join(lines))
        cases.append("        ;;")
    named = " ".join(f'{verb}\\:"{_zsh_text(VERBS[verb])}"' for verb in verbs)
    return ZSH.replace("@VERBS@", named).replace("@CASES@", "\n".join(cases)).rstrip("\n")


def _zsh_spec(option: Option) -> str:
    """Return what ``_arguments`` takes: ``--name=[about]:message:action``."""
    words = " ".join(option.words).replace(":", "\\:")
    action = {
        "none": " ",
        "words": f"({words})",
        "file": "_files",
        "folder": "_files -/" if not words else f"{{_files -/; compadd -- {words}}}",
        "data": f"{{_vtok_data {words}}}",
    }[option.kind]
    if not option.name:
        return f"*:argument:{action}"
    about = f"[{_zsh_text(option.about)}]"
    return f"{option.name}{about}" if option.flag else f"{option.name}={about}:value:{action}"


def _zsh_text(text: str) -> str:
    return re.sub(r"([][:\\\"`$])", r"\\\1", text.replace("'", "’"))


FISH = r"""# Completes vtok in fish; save this as ~/.config/fish/completions/vtok.fish
function __vtok_verb
    set -l words (commandline -opc)
    test (count $words) -gt 1; and test $words[2] = $argv[1]
end
function __vtok_data
    set -l value (commandline -ct | string replace -r '^--\w+=' '')
    if string match -q '*:*' -- $value
        set -l parts (string split -m 1 : -- $value)
        for path in (__fish_complete_path $parts[2])
            echo $parts[1]:$path
        end
    else
        printf '%s\n' $argv
    end
end
complete -c vtok -f
complete -c vtok -n 'test (count (commandline -opc)) -eq 1' -l version -d 'Print the version.'
"""


def fish(verbs: dict[str, list[Option]]) -> str:
    """Return the script for fish."""
    from visualtokens.cli.app import VERBS

    lines = [
        f"complete -c vtok -n 'test (count (commandline -opc)) -eq 1' -a {verb} -d {_fish_quote(VERBS[verb])}"
        for verb in verbs
    ]
    for verb, options in verbs.items():
        for option in options:
            words = [f"complete -c vtok -n '__vtok_verb {verb}'"]
            if option.name:
                words += [f"-l {option.name.removeprefix('--')}", f"-d {_fish_quote(option.about)}"]
            lines.append(" ".join([*words, *_fish_values(option)]))
    return FISH + "\n".join(lines)


def _fish_values(option: Option) -> Sequence[str]:
    if option.flag:
        return ()
    words = " ".join(option.words)
    needs = ["-r"] if option.name else []
    match option.kind:
        case "file":
            return [*needs, "-F"]
        case "folder":
            return [*needs, "-f", f"-a {_fish_quote(f'(__fish_complete_directories) {words}'.strip())}"]
        case "data":
            return [*needs, "-f", f"-a {_fish_quote(f'(__vtok_data {words})')}"]
        case _:
            return [*needs, "-f", *([f"-a {_fish_quote(words)}"] if words else [])]


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


VERB = Verb(config=CompletionConfig, run=run, example="vtok completion bash", positional="shell", light=True)
