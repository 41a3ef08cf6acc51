"""The configuration's shape: one frozen pydantic model per TOML table, with every bound.

Knows names, types, defaults and bounds. Does not read files (config_file.py does) and does not
know what the values are used for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr, model_validator

Count = Annotated[int, Field(ge=1)]

#: Marks what a running daemon takes over from a changed file, at SIGHUP.
RELOADABLE: dict[str, JsonValue] = {"reloadable": True}


class Section(BaseModel):
    """A TOML table: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    path: str | None = Field(
        None, description="GGUF file; unset: the default model SmolLM2-135M-Instruct (Q4_1)"
    )
    name: str | None = Field(
        None, description="name under which clients see the model; unset: the file's stem"
    )
    chat_template: str | None = Field(
        None, description="file with a Jinja chat template; unset: the one in the model file"
    )


class EngineSection(Section):
    library: str = Field(
        "llama", min_length=1, description='"llama", "sim", or the path of another libskippy'
    )
    expected_abi: str | None = Field(
        "0.1.63",
        pattern=r"^\d+\.\d+\.\d+$",
        description="exact ABI version that the library must have",
    )
    lanes: Annotated[int, Field(ge=1, le=256)] = Field(
        16, description="requests that can run at the same time"
    )
    context_tokens: Annotated[int, Field(ge=16, le=2**24)] = Field(
        2048, description="prompt and completion tokens that one request may hold"
    )
    batch_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(
        512, description="tokens of one native batch (n_batch): the iteration's token budget"
    )
    microbatch_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(
        512, description="tokens that the engine computes at once (n_ubatch)"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="compute threads; unset: the processors this process may use"
    )
    gpu_layers: Annotated[int, Field(ge=0)] = Field(0, description="layers offloaded to a GPU")
    kv: Literal["per_lane", "shared"] = Field(
        "per_lane", description="KV cache: a fixed share per lane, or one pool for all"
    )
    pool_tokens: Annotated[int, Field(ge=16)] | None = Field(
        None,
        description='KV cells of the pool with kv = "shared"; unset: lanes times context_tokens. '
        "With less, requests that run out of cells are preempted and go on later",
    )
    kv_type: Literal["f16", "f32", "q8_0", "q4_0", "bf16"] = Field(
        "f16", description="element type of the KV cache"
    )
    isolated: bool = Field(
        False,
        description="run the native engine in a process of its own: should it abort, requests "
        "pause instead of the daemon ending; costs about 0.1 ms an iteration",
    )
    deterministic: bool = Field(
        False,
        description="a request's tokens never depend on its company; refused where it cannot hold",
    )

    @model_validator(mode="after")
    def _consistent(self) -> EngineSection:
        if self.batch_tokens < self.lanes:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, below lanes = {self.lanes}: every running "
                "request needs one token of each iteration; raise batch_tokens or lower lanes"
            )
        if self.pool_tokens is not None and self.kv != "shared":
            raise ValueError('pool_tokens needs kv = "shared"')
        if self.pool_tokens is not None and self.pool_tokens < self.context_tokens:
            raise ValueError(
                f"pool_tokens is {self.pool_tokens}, below context_tokens = {self.context_tokens}: "
                "one request could not finish; raise pool_tokens or lower context_tokens"
            )
        if self.deterministic and self.kv != "per_lane":
            raise ValueError('deterministic = true needs kv = "per_lane"')
        if self.deterministic and self.threads not in (None, 1):
            raise ValueError(
                f"deterministic = true needs threads = 1 (or unset), found {self.threads}"
            )
        return self


class SchedulerSection(Section):
    waiting_requests_max: Count = Field(
        256,
        description="requests that may wait; one more is refused with 429",
        json_schema_extra=RELOADABLE,
    )
    waiting_tokens_max: Count = Field(
        1_000_000,
        description="prompt tokens that may wait; more are refused with 429",
        json_schema_extra=RELOADABLE,
    )
    inter_token_target_ms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="gap between a stream's tokens that new prompts may cause; "
        "unset: three times what the running streams take alone, or 300 ms if that is more "
        "(500 ms while at least as many requests wait for a first token as have streams)",
    )
    prefix_cache_tokens: Annotated[int, Field(ge=0)] = Field(
        8192, description="tokens of computed prefixes kept for requests that share them; 0: off"
    )
    prefix_cache_per_tenant: bool = Field(
        False, description="whether a tenant may use only prefixes of its own"
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="how a preempted request continues; auto: whichever takes less time"
    )
    aging_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="waiting that long lifts a request by one priority"
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="share of tokens by tenant; others have weight 1"
    )
    stream_buffer_tokens: Count = Field(
        256, description="tokens kept for a consumer that reads slowly before its request pauses"
    )
    watchdog_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="seconds that one native call may take before the engine counts as dead"
    )
    journal: str | None = Field(
        None,
        description="file that records every input, plan and outcome, prompts included, "
        'for replay; ".gz" compresses it; unset: none',
    )


class SpeculationSection(Section):
    method: Literal["off", "ngram", "mtp"] = Field(
        "off",
        description="guess tokens ahead and check them at once; ngram: what followed the last "
        "tokens earlier in the text; mtp: by heads that the model has for it",
    )
    draft_tokens: Annotated[int, Field(ge=1, le=8)] = Field(
        4, description="tokens guessed at most, of one request in one iteration"
    )
    requests_max: Count = Field(
        2, description="only while so many requests run or fewer: each is checked on its own"
    )


class ServerSection(Section):
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8080, description="port to listen on; 0 takes a free one"
    )
    unix_socket: str | None = Field(
        None, min_length=1, description="path of a Unix socket to listen on instead of a port"
    )
    unix_socket_mode: str = Field(
        "0660",
        pattern=r"^0?[0-7]{3}$",
        description="who may connect to the Unix socket, as octal permissions",
    )
    tls_cert: str | None = Field(
        None,
        description="PEM file with the certificate and its chain; set: HTTPS only",
        json_schema_extra=RELOADABLE,
    )
    tls_key: str | None = Field(
        None,
        description="PEM file with its key, unencrypted",
        json_schema_extra=RELOADABLE,
    )
    api_keys: tuple[SecretStr, ...] = Field(
        (),
        strict=False,
        description="bearer keys that clients must send, or their hashes (skippy-sched hash-key); "
        "none here and none in keys_file: no key is needed",
        json_schema_extra=RELOADABLE,
    )
    keys_file: str | None = Field(
        None,
        description="file of further API keys: hash, tenant, priority and rates of each",
        json_schema_extra=RELOADABLE,
    )
    admin_keys: tuple[SecretStr, ...] = Field(
        (),
        strict=False,
        description="keys for /admin, or their hashes; without any key at all, /admin answers "
        "this machine only",
        json_schema_extra=RELOADABLE,
    )
    body_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        4 * 2**20,
        description="largest request body",
        json_schema_extra=RELOADABLE,
    )
    connections_max: Count = Field(
        4096,
        description="open connections; on one more, requests are refused with 503",
        json_schema_extra=RELOADABLE,
    )
    header_timeout_s: Annotated[float, Field(gt=0)] = Field(
        10.0,
        description="seconds that a request's head may take to arrive",
        json_schema_extra=RELOADABLE,
    )
    body_timeout_s: Annotated[float, Field(gt=0)] = Field(
        60.0,
        description="seconds that a request's body may take to arrive",
        json_schema_extra=RELOADABLE,
    )
    write_timeout_s: Annotated[float, Field(gt=0)] = Field(
        30.0,
        description="seconds that a client may let 64 kB wait unread before its connection is "
        "cut and its request cancelled",
        json_schema_extra=RELOADABLE,
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        30.0,
        description="seconds that running requests get to finish at shutdown",
        json_schema_extra=RELOADABLE,
    )
    keep_alive_comment_s: Annotated[float, Field(gt=0)] = Field(
        15.0,
        description="seconds between comments on a stream whose request waits",
        json_schema_extra=RELOADABLE,
    )

    @model_validator(mode="after")
    def _consistent(self) -> ServerSection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both tls_cert and tls_key; set the other one, too")
        return self


class MetricsSection(Section):
    compat: Literal["none", "vllm"] = Field(
        "none", description="vllm: /metrics also gives what vLLM has under vLLM's names"
    )


class TracingSection(Section):
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="where spans of requests are sent by OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces (needs the extra otel); unset: nowhere",
    )


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is less grave is not logged", json_schema_extra=RELOADABLE
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: key=value for people on a terminal, JSON otherwise"
    )


class Config(Section):
    """Everything that the daemon or an embedded engine can be told."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    scheduler: SchedulerSection = SchedulerSection()
    speculation: SpeculationSection = SpeculationSection()
    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()
    log: LogSection = LogSection()
