//! Data that is in the program itself, each an engine and the grammar that it walks.

pub(crate) mod home;
pub(crate) mod stories;
