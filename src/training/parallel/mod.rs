//! Distributed training: one process (rank) per device.
//!
//! Rank 0 displays the run, owns its folder and sends the other ranks a command for each step. Each
//! rank computes its own rows of every batch, and gradients and parameters are exchanged between
//! the devices ([`Collective`](fireclay_kernels::Collective)). If a rank dies or becomes silent,
//! all ranks end without saving.

mod channel;
mod environment;
mod launch;
mod messages;

pub use channel::Ranks;
pub use environment::{Place, Start};
pub use launch::Launch;
pub(crate) use messages::{Begin, Command};
