"""The routes of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.detokenizer import token_bytes
from nanovllm.inspector.live import Live
from nanovllm.server import chat, completions, responses
from nanovllm.server.config import ServerConfig
from nanovllm.server.errors import ApiError, add_error_handlers
from nanovllm.server.inspector import inspector_router
from nanovllm.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from nanovllm.server.protocol import (
    TOKEN_ID,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from nanovllm.server.service import Service


def make_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The ASGI application that serves llm. Shutting llm down is the caller's.

    app.state.service is its Service; app.state.on_exit: functions to call when the server is told to end, before it
    waits for open connections.
    """
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="nanovllm",
        version=__version__,
        root_path=config.root_path,
        description="OpenAI-compatible inference",
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.on_exit = [service.begin_shutdown]
    add_error_handlers(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_operations(app, service)
    live = Live(llm)
    app.include_router(inspector_router(live))
    app.state.on_exit.append(live.close)
    _bound_token_ids(app.openapi(), llm.engine.vocab_size)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_bytes)
    if config.api_key:
        app.add_middleware(ApiKeyMiddleware, api_keys=config.api_key)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["*"],
            allow_headers=config.cors_header or ["*"],
            allow_credentials=config.cors_credentials,
        )
    return app


def _bound_token_ids(schema: Any, vocab_size: int | None) -> None:
    """Writes the model's vocabulary into the app's OpenAPI description, which FastAPI keeps."""
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _bound_token_ids(value, vocab_size)
    if isinstance(schema, dict) and schema.pop(TOKEN_ID, False) and vocab_size is not None:
        schema["maximum"] = vocab_size - 1


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=responses.generations(responses.Completion))
    async def create_completion(body: CompletionRequest) -> Response:
        return await completions.create(service, body)

    @app.post("/v1/chat/completions", responses=responses.generations(responses.ChatCompletion))
    async def create_chat_completion(body: ChatRequest) -> Response:
        return await chat.create(service, body)

    @app.post("/v1/embeddings", include_in_schema=False)
    async def create_embedding(body: EmbeddingRequest) -> Response:
        raise ApiError(400, "embeddings are not supported: this server generates text", code="not_supported")


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=responses.errors(400, 401, 404, 413, 500), response_model=responses.Tokens)
    async def tokenize(body: TokenizeTextRequest | TokenizeChatRequest) -> Any:
        service.check_model(body.model)
        token_ids = await service.prepare(_tokenize, service, body)
        strings = None
        if body.return_token_strs:
            strings = [token_bytes(service.llm.tokenizer, t).decode(errors="replace") for t in token_ids]
        limit = service.llm.config.max_model_len
        return {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": strings}

    @app.post("/detokenize", responses=responses.errors(400, 401, 404, 413, 500), response_model=responses.Text)
    async def detokenize(body: DetokenizeRequest) -> Any:
        service.check_model(body.model)
        return {"prompt": await service.prepare(_detokenize, service, body.tokens)}


def _tokenize(service: Service, body: TokenizeTextRequest | TokenizeChatRequest) -> list[int]:
    if isinstance(body, TokenizeTextRequest):
        try:
            return service.tokenize(body.prompt, body.add_special_tokens)
        except ValueError as e:
            raise ApiError(400, str(e), "prompt") from None
    return service.render(
        [m.for_template() for m in body.messages],
        tools=[t.model_dump(exclude_none=True) for t in body.tools] if body.tools else None,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )


def _detokenize(service: Service, token_ids: list[int]) -> str:
    llm = service.llm
    if llm.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer", "tokens")
    limit = llm.engine.vocab_size
    for token_id in token_ids:
        if limit is not None and token_id >= limit:
            raise ApiError(400, f"tokens: expected token ids in [0, {limit}), got {token_id}", "tokens")
    return llm.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=responses.errors(401))
    async def list_models() -> responses.ModelList:
        return responses.ModelList(data=[_model(service, name) for name in service.names])

    @app.get("/v1/models/{name:path}", responses=responses.errors(401, 404))
    async def retrieve_model(name: str) -> responses.Model:
        service.check_model(name)
        return _model(service, name)

    @app.get("/health", responses=responses.errors(503))
    async def health() -> responses.Health:
        service.llm.check_health()
        return responses.Health()

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def version() -> responses.Version:
        return responses.Version(version=__version__)

    @app.get("/", include_in_schema=False)
    async def root() -> JSONResponse:
        return JSONResponse({"name": "nanovllm", "version": __version__, "docs": "/docs", "models": "/v1/models"})


def _model(service: Service, name: str) -> responses.Model:
    llm = service.llm
    return responses.Model(
        id=name, created=service.created, root=llm.config.model, max_model_len=llm.config.max_model_len
    )
