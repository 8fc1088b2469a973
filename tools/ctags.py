"""What ctags says of C++ files: a dictionary for each thing that they define."""

import json
import subprocess


def tags(files, kinds, fields):
    """`kinds` and `fields` as ctags has them, for --c++-kinds and --fields."""
    lines = subprocess.run(
        ["ctags", "--language-force=C++", "--c++-kinds=" + kinds, "--fields=" + fields, "-f", "-",
         "--output-format=json", "-L", "-"],
        input="\n".join(files), stdout=subprocess.PIPE, universal_newlines=True, check=True).stdout
    return [json.loads(line) for line in lines.splitlines()]
