"""No module of the package imports itself by way of others, wherever in a file the imports stand."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_module_is_in_a_circle_of_imports() -> None:
    graph = grimp.build_graph("rung")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
