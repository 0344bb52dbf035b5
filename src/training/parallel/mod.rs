//! Ranks: processes that train one model together, a device each.
//!
//! The first rank leads: it shows the run, keeps its folder, and tells the others over a channel what to do, step by step. These have
//! their own rows of every batch; what all need is exchanged between the devices ([`Collective`](fireclay_kernels::Collective)). Where a
//! rank is gone or hears nothing of another one, all end, and nothing is saved from then on.

mod channel;
mod environment;
mod launch;
mod messages;

pub use channel::Ranks;
pub use environment::{Place, Start};
pub use launch::Launch;
pub(crate) use messages::{Begin, Command};
