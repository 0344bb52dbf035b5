//! Prometheus metrics.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::inference::generation::scheduler::Load;

type Labels = [(&'static str, String); 2];

/// Upper bounds of the histograms' buckets, in seconds.
const FIRST_TOKEN: [f64; 11] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const REQUEST: [f64; 11] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0];

/// The metrics. Those that vLLM also has are exported under its names, too, for dashboards made for
/// it.
pub(super) struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    seconds: Histogram,
    prompt_tokens: Counter,
    tokens: Counter,
    first_token: Histogram,
    queued: Gauge,
    reading: Gauge,
    writing: Gauge,
    pages: Gauge,
    pages_left: Gauge,
    preemptions: Counter<u64, AtomicU64>,
    /// Prompt tokens looked up in the KV cache, and those found.
    cache_queries: Counter,
    cache_hits: Counter,
    running: Gauge,
    usage: Gauge<f64, AtomicU64>,
    finished: Family<[(&'static str, String); 1], Counter>,
}

impl Metrics {
    /// Metrics of a model of this name.
    pub(super) fn new(model: &str) -> Self {
        let mut registry = Registry::default();
        macro_rules! metric {
            ($name:literal, $help:literal, $metric:expr) => {{
                let metric = $metric;
                registry.register(concat!("fireclay_", $name), $help, metric.clone());
                metric
            }};
        }
        let requests = metric!("requests", "Requests by path and status", Family::default());
        let seconds =
            metric!("request_seconds", "Time until an answer was complete", Histogram::new(REQUEST.into_iter()));
        let prompt_tokens = metric!("prompt_tokens", "Tokens of prompts", Counter::default());
        let tokens = metric!("tokens", "Tokens generated", Counter::default());
        let first_token = metric!(
            "first_token_seconds",
            "Time from a request to the first token of its answer",
            Histogram::new(FIRST_TOKEN.into_iter())
        );
        let queued = metric!("queued", "Sequences waiting for a slot", Gauge::default());
        let reading = metric!("reading", "Sequences in prefill, or past it and waiting for a slot", Gauge::default());
        let writing = metric!("writing", "Sequences decoding", Gauge::default());
        let pages = metric!("cache_pages", "Pages of the KV cache", Gauge::default());
        let pages_left = metric!("cache_pages_left", "Free pages of the KV cache", Gauge::default());
        let preemptions = metric!("preemptions", "Preemptions", Counter::default());
        let cache_queries =
            metric!("prefix_cache_queries", "Prompt tokens looked up in the KV cache", Counter::default());
        let cache_hits = metric!("prefix_cache_hits", "Prompt tokens found in the KV cache", Counter::default());
        let vllm = registry.sub_registry_with_label(("model_name".into(), model.to_string().into()));
        let (running, usage, finished) = (Gauge::default(), Gauge::default(), Family::default());
        vllm.register("vllm:num_requests_running", "Sequences in prefill or decoding", running.clone());
        vllm.register("vllm:num_requests_waiting", "Sequences that wait", queued.clone());
        vllm.register("vllm:kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1", usage.clone());
        vllm.register("vllm:num_preemptions", "Preemptions", preemptions.clone());
        vllm.register("vllm:prefix_cache_queries", "Tokens looked up in the KV cache", cache_queries.clone());
        vllm.register("vllm:prefix_cache_hits", "Tokens found in the KV cache", cache_hits.clone());
        vllm.register("vllm:prompt_tokens", "Tokens of prompts", prompt_tokens.clone());
        vllm.register("vllm:generation_tokens", "Tokens generated", tokens.clone());
        vllm.register("vllm:request_success", "Completed sequences, by reason", finished.clone());
        vllm.register("vllm:time_to_first_token_seconds", "Time to the first token", first_token.clone());
        vllm.register("vllm:e2e_request_latency_seconds", "Time of a request", seconds.clone());
        Self {
            registry,
            requests,
            seconds,
            prompt_tokens,
            tokens,
            first_token,
            queued,
            reading,
            writing,
            pages,
            pages_left,
            preemptions,
            cache_queries,
            cache_hits,
            running,
            usage,
            finished,
        }
    }

    /// The scheduler's load.
    pub(super) fn load(&self, load: Load, queued: usize) {
        self.queued.set((queued + load.waiting) as i64);
        self.reading.set(load.prefilling as i64);
        self.writing.set(load.decoding as i64);
        self.running.set((load.prefilling + load.decoding) as i64);
        self.pages.set(load.pages as i64);
        self.pages_left.set(load.free_pages as i64);
        self.usage.set((load.pages - load.free_pages) as f64 / load.pages.max(1) as f64);
        self.preemptions.inc_by((load.preemptions as u64).saturating_sub(self.preemptions.get()));
    }

    /// A prompt of this many tokens.
    pub(super) fn prompt(&self, tokens: u64) {
        self.prompt_tokens.inc_by(tokens);
    }

    /// Prompt tokens of a request, and those found in the KV cache.
    pub(super) fn cached(&self, tokens: u64, cached: u64) {
        self.cache_queries.inc_by(tokens);
        self.cache_hits.inc_by(cached);
    }

    /// New tokens of an answer, with the time to the first token.
    pub(super) fn written(&self, tokens: u64, first: Option<f64>) {
        self.tokens.inc_by(tokens);
        if let Some(seconds) = first {
            self.first_token.observe(seconds);
        }
    }

    /// A sequence is complete.
    pub(super) fn finished(&self, reason: &str) {
        self.finished.get_or_create(&[("finished_reason", reason.to_string())]).inc();
    }

    /// A response on a known path.
    pub(super) fn request(&self, path: &'static str, status: u16, seconds: f64) {
        self.requests.get_or_create(&[("path", path.to_string()), ("status", status.to_string())]).inc();
        self.seconds.observe(seconds);
    }

    /// In Prometheus' text format.
    pub(super) fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_vllms_names_too() {
        let metrics = Metrics::new("pots");
        metrics.load(Load { pages: 4, free_pages: 1, prefilling: 1, decoding: 2, ..Load::default() }, 5);
        metrics.cached(100, 64);
        metrics.written(7, Some(0.2));
        metrics.finished("stop");
        let text = metrics.text().expect("a text");
        for line in [
            "fireclay_tokens_total 7",
            "vllm:generation_tokens_total{model_name=\"pots\"} 7",
            "vllm:num_requests_running{model_name=\"pots\"} 3",
            "vllm:num_requests_waiting{model_name=\"pots\"} 5",
            "vllm:kv_cache_usage_perc{model_name=\"pots\"} 0.75",
            "vllm:prefix_cache_hits_total{model_name=\"pots\"} 64",
            "vllm:request_success_total{model_name=\"pots\",finished_reason=\"stop\"} 1",
            "vllm:time_to_first_token_seconds_count{model_name=\"pots\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in {text}");
        }
    }
}
