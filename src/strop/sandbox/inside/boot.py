"""Makes a package of this folder and starts it. Run as a script, so that it imports nothing else of strop."""

import os
import sys
import types

package = types.ModuleType("strop_inside")
package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["strop_inside"] = package

from strop_inside.main import main  # type: ignore[import-not-found]  # noqa: E402

main()
