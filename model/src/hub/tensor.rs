//! The tensors of a checkpoint, and their parameters.

use crate::config::TransformerConfig;

/// A tensor of a hub checkpoint, and its parameter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HubTensor {
    /// Its name on the hub.
    pub(crate) name: String,
    /// The path of its parameter.
    pub(crate) path: String,
    /// The parameter's rows that it fills; `None` for all.
    pub(crate) rows: Option<std::ops::Range<usize>>,
    /// Whether it is stored `[d_input, d_output]`.
    pub(crate) transposed: bool,
    /// Rows per head, or per stacked matrix, if the rows of its halves are interleaved.
    pub(crate) interleaved: Option<usize>,
    /// The number of matrices, or vectors, that it stacks along an axis of its own, if it does:
    /// `[stacked, rows, columns]`. Each is stored `[columns, rows]` if it is transposed.
    pub(crate) stacked: Option<usize>,
    /// What is added to stored values: one for norms whose weights are stored less one.
    pub(crate) offset: f32,
}

/// Prefixes that some checkpoints of a family have.
pub(crate) const OPTIONAL_PREFIXES: [&str; 3] = ["transformer.", "bert.", "model."];

/// A tensor for the whole parameter at `path`.
pub(crate) fn whole(name: String, path: &str) -> HubTensor {
    HubTensor { name, path: path.into(), rows: None, transposed: false, interleaved: None, stacked: None, offset: 0.0 }
}

/// Separate tensors for queries, keys and values.
pub(crate) fn split_qkv(config: &TransformerConfig, names: [String; 3], path: &str) -> Vec<HubTensor> {
    let (query, key) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    let ranges = [0..query, query..query + key, query + key..query + 2 * key];
    names.into_iter().zip(ranges).map(|(name, rows)| HubTensor { rows: Some(rows), ..whole(name, path) }).collect()
}
