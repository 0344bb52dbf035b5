//! The tensors of a checkpoint, and where they belong.

use crate::config::TransformerConfig;

/// One tensor of a hub checkpoint, and where it belongs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HubTensor {
    /// Its name on the hub.
    pub(crate) name: String,
    /// The parameter that holds it.
    pub(crate) path: String,
    /// The parameter's rows that it fills; all where `None`.
    pub(crate) rows: Option<std::ops::Range<usize>>,
    /// Whether it is stored `[d_input, d_output]`.
    pub(crate) transposed: bool,
    /// Rows of a head, where each has those of its halves in turn.
    pub(crate) interleaved: Option<usize>,
}

/// Prefixes that some checkpoints of a family carry and others do not.
pub(crate) const OPTIONAL_PREFIXES: [&str; 3] = ["transformer.", "bert.", "model."];

/// All of the parameter at `path`, under `name`.
pub(crate) fn whole(name: String, path: &str) -> HubTensor {
    HubTensor { name, path: path.into(), rows: None, transposed: false, interleaved: None }
}

/// Queries, keys and values apart, under the three names given.
pub(crate) fn split_qkv(config: &TransformerConfig, names: [String; 3], path: &str) -> Vec<HubTensor> {
    let (query, key) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    let ranges = [0..query, query..query + key, query + key..query + 2 * key];
    names.into_iter().zip(ranges).map(|(name, rows)| HubTensor { rows: Some(rows), ..whole(name, path) }).collect()
}
