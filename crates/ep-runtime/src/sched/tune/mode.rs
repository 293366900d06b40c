//! Whether a layer looks for launch plans when it is built.

use std::str::FromStr;
use std::time::Duration;

use crate::{EpError, Result};

/// Environment variable that says how layers are tuned, whatever their builders say: `off`, `cached`,
/// `search`, or `search:SECONDS`. Plans given by `EpBuilder::tuning` are launched all the same.
pub const TUNE_VARIABLE: &str = "EP_TUNE";

/// What a layer on a GPU does about its launch plans when it is built. It changes times, never results.
///
/// Whatever it does, a plan that `EpBuilder::tuning` gives is the one that is launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tune {
    /// What this crate ships for the device.
    Off,
    /// What an earlier search found for the same device, group size and shape, if the
    /// [cache](crate::sched::tune::TuneCache) has it; else as [`Tune::Off`].
    #[default]
    Cached,
    /// As [`Tune::Cached`]; what the cache lacks is searched for, and kept.
    ///
    /// All ranks search together, and have to ask for it: they run dispatches and combines of made-up
    /// tokens, as many as the layer takes at most, under each plan, and take the plan whose slowest
    /// rank was the fastest. Where SMs are set aside for communication ([`SmPolicy`](crate::SmPolicy)),
    /// a kernel holds all others meanwhile, as compute would. The memory this takes, about twice that
    /// of the tokens, is given back before the layer is.
    Search {
        /// What the search may take, measured on the slowest rank. What surrounds it (compiling, memory,
        /// the last measurement) comes on top; operations that hang end by the layer's time-out.
        limit: Duration,
    },
}

/// What a search may take where nothing else is said.
pub(crate) const SEARCH: Duration = Duration::from_secs(4);
/// The longest search: what is longer than this was meant otherwise.
const LONGEST: f64 = 600.0;

impl Tune {
    /// A search of at most four seconds.
    pub fn search() -> Self {
        Self::Search { limit: SEARCH }
    }

    /// What [`TUNE_VARIABLE`] says; `None` where it is not set, or empty.
    ///
    /// # Errors
    /// When it says nothing that is known.
    pub fn from_env() -> Result<Option<Self>> {
        match std::env::var_os(TUNE_VARIABLE) {
            Some(text) if !text.is_empty() => text.to_string_lossy().parse().map(Some),
            _ => Ok(None),
        }
    }
}

impl FromStr for Tune {
    type Err = EpError;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            let detail = format!(
                "{TUNE_VARIABLE}={text}: expected off, cached, search or search:SECONDS (up to {LONGEST})"
            );
            EpError::argument("tune", detail)
        };
        match text.trim() {
            "off" => Ok(Self::Off),
            "cached" => Ok(Self::Cached),
            "search" => Ok(Self::search()),
            other => {
                let seconds = other.strip_prefix("search:").ok_or_else(bad)?;
                let seconds: f64 = seconds.parse().map_err(|_| bad())?;
                match seconds > 0.0 && seconds <= LONGEST {
                    true => Ok(Self::Search { limit: Duration::from_secs_f64(seconds) }),
                    false => Err(bad()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_and_nonsense_is_named() {
        let limit = Duration::from_millis(1500);
        for (text, mode) in [
            ("off", Tune::Off),
            (" cached ", Tune::default()),
            ("search", Tune::search()),
            ("search:1.5", Tune::Search { limit }),
        ] {
            assert_eq!(text.parse::<Tune>().unwrap(), mode, "{text}");
        }
        for text in
            ["on", "search:", "search:-1", "search:0", "search:inf", "search:NaN", "search:1e9"]
        {
            let error = text.parse::<Tune>().unwrap_err().to_string();
            assert!(error.contains(&format!("EP_TUNE={text}")), "{error}");
        }
    }
}
