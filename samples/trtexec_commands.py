"""The command lines for a GPU machine: build and time an engine, with the plugin and without, for each TensorRT.

    python samples/trtexec_commands.py [MAPPED_ONNX]

Prints a shell script for each tool; nothing is run. Both engines come from one file: with the library loaded TensorRT
runs the plugin, without it the operator's body as its own layers, which is the baseline to compare with.
"""

import sys
from pathlib import Path

from moetrt import trtexec
from moetrt.library import find_plugin_library

# Input name -> smallest, most common and largest sizes.
PROFILE = {"input_ids": ((1, 1), (1, 16), (4, 64))}
MEASURED = {"input_ids": (1, 16)}


def main(model: Path) -> None:
    """Prints the commands."""
    library = find_plugin_library()
    for tool in trtexec.TOOLS.values():
        print(f"\n# {tool.title}")
        for name, plugin in (("plugin", library), ("baseline", None)):
            engine = model.with_suffix(f".{name}.engine")
            build = trtexec.build_command(model, engine, tool_key=tool.key, plugin_library=plugin, profile=PROFILE)
            run = trtexec.run_command(
                engine,
                tool_key=tool.key,
                plugin_library=plugin,
                shapes=MEASURED,
                export_prefix=model.with_suffix(f".{name}"),
                per_layer=True,
            )
            print(trtexec.command_text(build))
            print(trtexec.command_text(run))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo/mapped.onnx"))
