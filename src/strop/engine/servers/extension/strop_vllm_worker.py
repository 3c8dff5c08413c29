"""strop's weight transfer engine for vLLM: weights come in the files of a directory, and are proven before it accepts them.

It runs in the server's environment, which has no strop. vLLM imports it in every worker (`--worker-extension-cls
strop_vllm_worker.StropWorker`), which registers the engine (`--weight-transfer-config '{"backend": "strop"}'`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from strop_weights_proof import NUM_THREADS, prove, prove_adapter, read_weights
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FilesInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # Any where vLLM is not installed
    directory: str
    checksum: str  # strop's `weights_checksum`


class FilesTransferEngine(WeightTransferEngine[WeightTransferInitInfo, FilesInfo]):  # type: ignore[misc]
    """Replaces every weight in place. All is done in `update_weights`: after a failure there vLLM takes the next update."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, FilesInfo

    def receive_weights(self, update_info: FilesInfo) -> None:
        directory, digests = Path(update_info.directory), list[Future[bytes]]()
        initialize_layerwise_reload(self.model)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            loaded = self.model.load_weights(read_weights(directory, digests, threads))
        finalize_layerwise_reload(self.model, self.model_config)
        prove(self.model, loaded, directory, digests, update_info.checksum)

    def start_weight_update(self, *_: object) -> None:
        """Nothing; nor do the others of vLLM's interface."""

    init_transfer_engine = finish_weight_update = shutdown = start_weight_update


class StropWorker:
    """A method of vLLM's worker, which imports this file for it; it is called by `/collective_rpc`."""

    def prove_adapter(self, directory: str, checksum: str) -> None:
        prove_adapter(self.get_model(), Path(directory), checksum)  # type: ignore[attr-defined]  # of vLLM's worker


WeightTransferEngineFactory.register_engine("strop", FilesTransferEngine)
