"""Names, labels and help texts of all router metrics (`ullage_router_*`).

Each label has only a few values, which keeps the number of time series low.
"""

from ullage_common.process.metrics import SECONDS, CounterName, GaugeName, HistogramName

SHARES = tuple(tenth / 10 for tenth in range(1, 11))
# People read 4 to 13 tokens a second.
SPEEDS = (1.0, 2.0, 4.0, 7.0, 10.0, 13.0, 20.0, 40.0, 80.0, 160.0, 320.0)
LENGTHS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)

# requests ----------------------------------------------------------------------------------------

DECISIONS = CounterName(
    "ullage_router_decisions",
    "Requests by what was decided about them",
    ("action", "route"),
)
REQUESTS = CounterName(
    "ullage_router_requests",
    "Requests by HTTP status, of gRPC the status that says the same; 499: client gone",
    ("code",),
)
REFUSALS = CounterName(
    "ullage_router_refusals",
    "Requests that the ladder ended with a refusal, by its reason; STOPPED: of a stopped service",
    ("reason",),
)
TTFT = HistogramName(
    "ullage_router_ttft_seconds", "From arrival to the first token", buckets=SECONDS
)
E2E = HistogramName("ullage_router_e2e_seconds", "From arrival to the last token", buckets=SECONDS)
QUEUE_WAIT = HistogramName(
    "ullage_router_queue_wait_seconds",
    "In the queue, of requests that waited",
    ("tenant", "priority"),
    buckets=SECONDS,
)
STREAM_SPEED = HistogramName(
    "ullage_router_stream_tokens_per_second",
    "Speed of answers after their first token; people read 4 to 13 tokens a second",
    buckets=SPEEDS,
)
EARLY_STOPS = CounterName(
    "ullage_router_early_stops",
    "Requests whose client left before the end, by whether it had a token already",
    ("had_tokens",),
)
EARLY_STOP_TOKENS = HistogramName(
    "ullage_router_early_stop_tokens",
    "Output tokens that a client had when it left before the end",
    buckets=LENGTHS,
)
RESUMPTIONS = CounterName(
    "ullage_router_resumptions",
    "Answers that lost their engine after the first token, by why, and what became of them",
    ("cause", "outcome"),
)
COALESCED = CounterName(
    "ullage_router_coalesced_requests", "Requests that shared another's generation"
)
REPLACED = CounterName("ullage_router_replaced_requests", "Requests that a later one replaced")
REPEATED = CounterName(
    "ullage_router_repeated", "Requests that got the answer of an earlier one by its key"
)
KEPT_ANSWERS = GaugeName("ullage_router_kept_answer_bytes", "Bytes of finished answers by key")
INFLIGHT = GaugeName("ullage_router_inflight_requests", "Requests being served")
CACHED_TOKENS = CounterName(
    "ullage_router_cached_tokens",
    "Prompt tokens whose KV engines had, by tier",
    ("tier",),
)

CPU_WAITING = CounterName(
    "ullage_router_cpu_waiting_seconds",
    "Time in which some thread of the container waited for a core; without cgroup v2 of the node",
)

# waiting -----------------------------------------------------------------------------------------

QUEUE_REQUESTS = GaugeName("ullage_router_queue_requests", "Requests waiting for memory")
QUEUE_BYTES = GaugeName("ullage_router_queue_bytes", "Predicted bytes that wait for memory")
QUEUE_PROMPT_BYTES = GaugeName(
    "ullage_router_queue_prompt_bytes", "Memory of the router that waiting requests hold"
)
QUEUE_PASSED = CounterName(
    "ullage_router_queue_passed", "Requests that passed one that waits first in line"
)
PREFILL_REQUESTS = GaugeName("ullage_router_prefill_requests", "Requests in the prefill window")
PREFILL_WAITED = CounterName(
    "ullage_router_prefill_waited", "Requests that waited in the prefill window"
)
PREFILL_BALANCED = CounterName(
    "ullage_router_prefill_balanced", "Requests that the prefill window moved to another engine"
)
HELD_REQUESTS = GaugeName("ullage_router_held_requests", "Requests held until a pool wakes")
WANTED_REQUESTS = GaugeName(
    "ullage_router_wanted_requests", "Requests that want a pool which sleeps", ("pool",)
)

# engines -----------------------------------------------------------------------------------------

ENGINES_READY = GaugeName("ullage_router_engines_ready", "Engines that take requests")
STALE_ENGINES = GaugeName("ullage_router_stale_engines", "Engines whose last report is too old")
EJECTED_ENGINES = GaugeName(
    "ullage_router_ejected_engines", "Engines that get nothing because requests failed on them"
)
BREAKER_LIMIT = GaugeName(
    "ullage_router_breaker_limit",
    "Fewest requests at once that an engine may get since requests failed on it; 0: no limit",
    ("pool",),
)
HEADROOM_AGE = GaugeName(
    "ullage_router_headroom_age_seconds", "Age of the oldest last report among engines"
)
CREDIT_BYTES = GaugeName(
    "ullage_router_credit_bytes", "Bytes reserved for requests that no report includes yet"
)
FINGERPRINTS = GaugeName(
    "ullage_router_fingerprints",
    "Different fingerprints among the engines of a pool; above 1 their answers may differ",
    ("pool",),
)
REPORTS_MISSED = CounterName("ullage_router_reports_missed", "Headroom reports that never came")
PREEMPTIONS = CounterName(
    "ullage_router_preemptions",
    "Times that engines preempted answers for memory, counted when the answers ended",
)
EJECTIONS = CounterName("ullage_router_ejections", "Times that a breaker opened")
OUTPUT_TOKENS = CounterName(
    "ullage_router_output_tokens", "Tokens of answers that ended, also of those that broke off"
)
RETRIES = CounterName("ullage_router_retries", "Requests sent to another engine")
RETRIES_REFUSED = CounterName(
    "ullage_router_retries_refused", "Requests not retried, because the budget was spent"
)
AFFINITY_KEPT = CounterName("ullage_router_affinity_kept", "Requests on the engine of their caches")
AFFINITY_YIELDED = CounterName("ullage_router_affinity_yielded", "Requests sent elsewhere")

# clients that stream straight from engines -------------------------------------------------------

OPEN_PICKS = GaugeName("ullage_router_open_picks", "Tickets given whose request has not ended")
PICKS_PLACED = CounterName("ullage_router_picks_placed", "Requests that Pick placed")
PICKS_REFUSED = CounterName("ullage_router_picks_refused", "Requests that Pick refused")
PICKS_EXPIRED = CounterName(
    "ullage_router_picks_expired", "Tickets that expired without a report of their request's end"
)

# prompts, cascade, rollouts ----------------------------------------------------------------------

COMPRESSIONS = CounterName(
    "ullage_router_compressions",
    "Long conversations by how their oldest turns were summed up; refused: facts were lost",
    ("method",),
)
SAVED_TOKENS = CounterName(
    "ullage_router_compression_saved_tokens", "Prompt tokens that summaries saved"
)
CASCADE_ATTEMPTS = CounterName(
    "ullage_router_cascade_attempts",
    "Steps of the cascade that were tried, by what became of them",
    ("step", "outcome"),
)
CASCADE_CONFIDENCE = HistogramName(
    "ullage_router_cascade_confidence",
    "Geometric mean probability of the first tokens that were judged",
    ("step",),
    buckets=SHARES,
)
CASCADE_DISCARDED = CounterName(
    "ullage_router_cascade_discarded_tokens",
    "Tokens generated by attempts that were thrown away, as far as they arrived",
    ("step",),
)
REVISION_REQUESTS = CounterName(
    "ullage_router_revision_requests",
    "Requests sent to engines by side of a rollout and HTTP status",
    ("side", "code"),
)
TRIAL = GaugeName(
    "ullage_router_trial",
    "Requests of the canary's present trial by side: outcomes, and times by bucket",
    ("trial", "side", "what", "le"),
)
ANSWERS = GaugeName(
    "ullage_router_answers",
    "Replays of the canary's present trial: prompts and tokens compared, tokens agreed, "
    "negative log-probabilities by side in nats, and prompts refused",
    ("trial", "what"),
)
ANSWERS_UNJUDGED = GaugeName(
    "ullage_router_answers_unjudged",
    "1 with the reason why no answers of the canary's present trial are being compared",
    ("trial", "reason"),
)

# files and batches -------------------------------------------------------------------------------

FILES = GaugeName(
    "ullage_router_files", "Stored files, also those that arrive or that a batch writes"
)
FILE_BYTES = GaugeName(
    "ullage_router_file_bytes", "Bytes of stored files, also of those that arrive or grow"
)
FILES_LIMIT = GaugeName("ullage_router_files_limit", "Most files that the store takes")
FILE_BYTES_LIMIT = GaugeName("ullage_router_file_bytes_limit", "Most bytes that the store takes")
FILE_STORE_OPEN = GaugeName(
    "ullage_router_file_store_open", "1 while the folder of files can be used, else 0"
)
UPLOADS = GaugeName("ullage_router_uploads", "Files that arrive now")
BATCHES = GaugeName("ullage_router_batches", "Batches that are known, by their status", ("status",))
BATCH_REQUESTS = GaugeName(
    "ullage_router_batch_requests",
    "Requests of batches that have not ended: waiting for an answer, or running",
    ("state",),
)
BATCH_REQUESTS_ENDED = CounterName(
    "ullage_router_batch_requests_ended",
    "Requests of batches that got a line, by whether that is an answer (completed) or an error",
    ("state",),
)
BATCH_REQUESTS_SENT = CounterName(
    "ullage_router_batch_requests_sent",
    "Requests of batches that were sent, once for each try",
)

# tenants and secrets -----------------------------------------------------------------------------

TENANT_REQUESTS = CounterName(
    "ullage_router_tenant_requests", "Requests by tenant and HTTP status", ("tenant", "code")
)
TENANT_TOKENS = CounterName(
    "ullage_router_tenant_tokens",
    "Tokens served by tenant; kind: prompt or output",
    ("tenant", "kind"),
)
TENANT_LIMITED = CounterName(
    "ullage_router_tenant_limited",
    "Requests refused by tenant and the limit that was reached",
    ("tenant", "limit"),
)
AUTH_FAILURES = CounterName(
    "ullage_router_auth_failures",
    "Requests refused for their key, by what was wrong",
    ("reason",),
)
KEY_PROBLEMS = GaugeName(
    "ullage_router_key_problems",
    "Files of tenants' keys that cannot be read, while those before stay valid",
)
CERTIFICATE_PROBLEMS = GaugeName(
    "ullage_router_certificate_problems",
    "Certificates that have expired, or whose newest files cannot be used",
)
CERTIFICATE_EXPIRY = GaugeName(
    "ullage_router_certificate_expiry_timestamp_seconds",
    "When the first of the certificates ends; 0 without TLS",
)
