//! Who asks: keys, and the addresses that requests come from.

use std::net::IpAddr;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::failure::Failure;

/// Whom a request comes from: those of one key and one address are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    pub(super) key: usize,
    pub(super) address: IpAddr,
}

/// The keys that are let in.
pub(super) struct Keys(Vec<[u8; 32]>);

impl Keys {
    pub(super) fn new(keys: &[String]) -> Result<Self, Failure> {
        if keys.iter().any(|key| key.trim().is_empty()) {
            return Err(Failure::usage("an API key is empty"));
        }
        Ok(Self(keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect()))
    }

    /// Whether none is asked for.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Which of the keys this is. How long it takes does not tell how much of it is right, nor which one it is.
    pub(super) fn find(&self, key: &str) -> Option<usize> {
        let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let mut found = None;
        for (at, key) in self.0.iter().enumerate() {
            if bool::from(key.ct_eq(&given)) {
                found = Some(at);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_whole_only() {
        let keys = Keys::new(&["kiln".into(), "glaze".into()]).expect("keys");
        assert_eq!(keys.find("glaze"), Some(1));
        assert_eq!(["", "kil", "kiln ", "Kiln"].map(|key| keys.find(key)), [None; 4]);
        assert!(Keys::new(&[" ".into()]).is_err());
    }
}
