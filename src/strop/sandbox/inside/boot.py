"""Makes a package of this folder and runs `main` of one of its modules. A script, so that it imports nothing else of strop.

boot.py main SETTINGS        a fork server
boot.py confine SOCKET       prepares copies of sessions
boot.py verify               compares answers in a plain process
"""

import importlib
import os
import sys
import types

package = types.ModuleType("strop_inside")
package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["strop_inside"] = package

importlib.import_module(f"strop_inside.{sys.argv[1]}").main()
