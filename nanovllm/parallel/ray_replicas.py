"""Replicas of an engine behind Ray Serve: a request goes to the one that has fewest. Needs `pip install ray[serve]`.

    python -m nanovllm.parallel.ray_replicas MODEL --num-replicas 4 --tensor-parallel-size 2
    curl localhost:8000 -d '{"prompt": "The capital of France is", "max_tokens": 16}'

From Python, `serve.run(replicas(MODEL, 4))` gives a handle: `await handle.generate.remote("The capital of France is")`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

try:
    from ray import serve
    from starlette.responses import JSONResponse
except ImportError as e:
    raise ImportError("nanovllm.parallel.ray_replicas: expected Ray Serve, got none: pip install 'ray[serve]'") from e

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import EngineConfig
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

_HEALTH_SECONDS = 2.0  # between two checks; Ray replaces a replica after three that fail


class Replica:
    """One engine, in a process of Ray's; its workers, with tensor parallelism, are that process's children."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._llm = AsyncLLM(model, **options)

    async def generate(self, prompt: str | list[int], params: SamplingParams | None = None) -> RequestOutput:
        """AsyncLLM.generate's last output. A caller that is cancelled aborts its request.

        Raises:
            ValueError, TypeError: the request can never run. RuntimeError: the engine failed.
        """
        outputs = [output async for output in self._llm.generate(prompt, params)]
        return outputs[-1]

    def check_health(self) -> None:
        """Ray replaces a replica that raises here: an engine whose worker failed does not come back by itself."""
        self._llm.check_health()

    async def __call__(self, request: Any) -> JSONResponse:
        """HTTP: a JSON object with prompt and, beside it, fields of SamplingParams; status 400 when refused."""
        try:
            fields = json.loads(await request.body())
            prompt = fields.pop("prompt")
            params = SamplingParams(**{**_values(self._llm.default_sampling_params), **fields})
            output = await self.generate(prompt, params)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            return JSONResponse({"error": f"{type(e).__name__}: {e}"}, status_code=400)
        return JSONResponse(
            {
                "texts": [c.text for c in output.outputs],
                "token_ids": [c.token_ids for c in output.outputs],
                "finish_reasons": [c.finish_reason for c in output.outputs],
            }
        )

    def __del__(self) -> None:
        llm = self.__dict__.get("_llm")
        if llm is not None:
            llm.shutdown()


def _values(params: SamplingParams) -> dict[str, Any]:
    return {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.init}


def replicas(model: str, num_replicas: int, **options: Any) -> serve.Application:
    """The application of num_replicas engines, for ray.serve.run.

    On CUDA each replica asks Ray for tensor_parallel_size GPUs; with device="cpu" for none.

    Args:
        **options: the fields of EngineConfig, checked here.
    Raises:
        TypeError, ValueError: an option or num_replicas is not allowed.
    """
    config = EngineConfig.from_kwargs(model, **options)
    if num_replicas < 1:
        raise ValueError(f"num_replicas: expected at least 1, got {num_replicas}")
    num_gpus = 0 if config.device == "cpu" else config.tensor_parallel_size
    deployment = serve.deployment(
        Replica,
        name="nanovllm",
        num_replicas=num_replicas,
        max_ongoing_requests=config.max_num_seqs,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options={"num_gpus": num_gpus},
    )
    return deployment.bind(model, options)


def main() -> None:
    from nanovllm.cli.flags import add_engine_flags, engine_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-replicas", type=int, default=2, metavar="N")
    add_engine_flags(parser)
    args = parser.parse_args()
    options = {f.name: getattr(engine_config(args), f.name) for f in dataclasses.fields(EngineConfig)}
    serve.run(replicas(options.pop("model"), args.num_replicas, **options), blocking=True)


if __name__ == "__main__":
    main()
