//! What launchers tell a process.

use super::{Rendezvous, bad, check_size};
use crate::Result;

/// A launcher's variables: rank, world size, local rank.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local: &'static str,
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher { name: "this library", rank: "EP_RANK", world: "EP_WORLD", local: "EP_LOCAL_RANK" },
    Launcher { name: "torchrun", rank: "RANK", world: "WORLD_SIZE", local: "LOCAL_RANK" },
    Launcher { name: "Slurm", rank: "SLURM_PROCID", world: "SLURM_NTASKS", local: "SLURM_LOCALID" },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
];

/// What tells jobs apart, in order of preference.
const TOKENS: [&str; 5] = [
    "EP_JOB_TOKEN",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
];

impl Rendezvous {
    /// What the environment says.
    ///
    /// * Rank and world size: `EP_RANK` and `EP_WORLD`, else torchrun's, Slurm's, Open MPI's; both
    ///   always of the same launcher.
    /// * Address: `EP_RENDEZVOUS` (`host:port`), else `MASTER_ADDR` and the port after
    ///   `MASTER_PORT` (which belongs to the framework).
    /// * Job token: `EP_JOB_TOKEN`, else the launcher's job id, else empty.
    /// * Time-out: `EP_TIMEOUT` in seconds, else 60.
    ///
    /// # Errors
    /// An argument error that names what is missing or malformed, and what to set.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// [`Rendezvous::from_env`] with the variables that `var` gives.
    ///
    /// # Errors
    /// As [`Rendezvous::from_env`].
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let launcher = launcher(&var)?;
        let rank = number(launcher.rank, &var(launcher.rank).unwrap_or_default())?;
        let world = number(launcher.world, &var(launcher.world).unwrap_or_default())?;
        check_size(&format!("{}=", launcher.world), world)?;
        let (host, port) = address(&var)?;
        let mut rendezvous = Self::checked(rank, world, host, port).map_err(|_| {
            bad(format!("{}={rank} is not below {}={world}", launcher.rank, launcher.world))
        })?;
        if let Some(local) = var(launcher.local) {
            rendezvous.local_rank = Some(number(launcher.local, &local)?);
        }
        if let Some(seconds) = var("EP_TIMEOUT") {
            let parsed = seconds.trim().parse().ok().filter(|&s: &f64| s > 0.0);
            let timeout = parsed.and_then(|s| std::time::Duration::try_from_secs_f64(s).ok());
            rendezvous.timeout = timeout.ok_or_else(|| {
                bad(format!("EP_TIMEOUT={seconds:?} is not a positive number of seconds"))
            })?;
        }
        rendezvous.with_token(TOKENS.iter().find_map(|name| var(name)).unwrap_or_default())
    }
}

fn launcher(var: &impl Fn(&str) -> Option<String>) -> Result<&'static Launcher> {
    let mut halves = Vec::new();
    for launcher in &LAUNCHERS {
        match (var(launcher.rank), var(launcher.world)) {
            (Some(_), Some(_)) => return Ok(launcher),
            (Some(_), None) => halves.push((launcher.rank, launcher.world)),
            (None, Some(_)) => halves.push((launcher.world, launcher.rank)),
            (None, None) => continue,
        }
        // Someone who sets one of ours by hand means it.
        if launcher.rank == "EP_RANK" {
            break;
        }
    }
    let looked: Vec<String> =
        LAUNCHERS.iter().map(|l| format!("{} and {} ({})", l.rank, l.world, l.name)).collect();
    let half: Vec<String> =
        halves.iter().map(|(set, unset)| format!("{set} is set but {unset} is not")).collect();
    let half = if half.is_empty() { String::new() } else { format!(" ({})", half.join("; ")) };
    Err(bad(format!(
        "no rank and world size{half}: looked for {}; set EP_RANK and EP_WORLD",
        looked.join(", ")
    )))
}

fn number(name: &str, value: &str) -> Result<usize> {
    let parsed = value.trim().parse::<u32>().ok();
    parsed
        .map(|n| n as usize)
        .ok_or_else(|| bad(format!("{name}={value:?} is not a number from 0 to {}", u32::MAX)))
}

fn address(var: &impl Fn(&str) -> Option<String>) -> Result<(String, u16)> {
    if let Some(address) = var("EP_RENDEZVOUS") {
        return split_address("EP_RENDEZVOUS", &address);
    }
    let (Some(host), Some(port)) = (var("MASTER_ADDR"), var("MASTER_PORT")) else {
        return Err(bad("no rendezvous address: looked for EP_RENDEZVOUS, MASTER_ADDR and \
             MASTER_PORT; set EP_RENDEZVOUS to host:port of rank 0, with a port free there"
            .into()));
    };
    match port.trim().parse::<u16>().ok().and_then(|port| port.checked_add(1)) {
        Some(port) if port > 1 => Ok((strip(host.trim()).to_owned(), port)),
        _ => Err(bad(format!(
            "MASTER_PORT={port:?} is not a port from 1 to 65534 (the one after it is used); \
             set EP_RENDEZVOUS to host:port instead"
        ))),
    }
}

/// Takes `host:port` or `[v6]:port` apart.
pub(super) fn split_address(name: &str, address: &str) -> Result<(String, u16)> {
    let wrong = || bad(format!("{name} {address:?} is not host:port (or [v6 address]:port)"));
    let (host, port) = address.trim().rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse::<u16>().ok().filter(|&port| port != 0).ok_or_else(wrong)?;
    let bare = strip(host);
    // A v6 address without brackets could be cut at the wrong colon.
    let fine = !bare.is_empty()
        && !bare.contains(char::is_whitespace)
        && bare.contains(':') == (bare.len() != host.len());
    if fine { Ok((bare.to_owned(), port)) } else { Err(wrong()) }
}

fn strip(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<Rendezvous> {
        let vars: HashMap<&str, &str> = vars.iter().copied().collect();
        Rendezvous::from_vars(|name| vars.get(name).map(|v| (*v).to_owned()))
    }

    fn error(vars: &[(&str, &str)]) -> String {
        from(vars).unwrap_err().to_string()
    }

    const AT: (&str, &str) = ("EP_RENDEZVOUS", "node0:29501");

    #[test]
    fn our_variables_come_first_and_sets_are_not_mixed() {
        let torch = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")];
        let r = from(&[AT, ("EP_RANK", "1"), ("EP_WORLD", "2"), torch[0], torch[1], torch[2]]);
        let r = r.unwrap();
        assert_eq!((r.rank(), r.world(), r.local_rank()), (1, 2, None));
        let e = error(&[AT, ("EP_RANK", "1"), torch[0], torch[1]]);
        assert!(e.contains("EP_RANK is set but EP_WORLD is not"), "{e}");
        // A stray SLURM_NTASKS takes no part in Open MPI's set.
        let mpi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let r = from(&[AT, ("SLURM_NTASKS", "9"), mpi[0], mpi[1]]).unwrap();
        assert_eq!((r.rank(), r.world()), (3, 4));
    }

    #[test]
    fn torchrun_gives_everything() {
        let r = from(&[
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("TORCHELASTIC_RUN_ID", "job7"),
        ])
        .unwrap();
        assert_eq!((r.rank(), r.world(), r.local_rank()), (5, 8, Some(1)));
        assert_eq!((r.address().as_str(), r.token.as_str()), ("node0:29501", "job7"));
    }

    #[test]
    fn slurm_needs_only_an_address() {
        let slurm = [("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "0")];
        let r = from(&[AT, slurm[0], slurm[1], slurm[2], ("SLURM_JOB_ID", "42")]).unwrap();
        assert_eq!((r.rank(), r.token.as_str()), (2, "42"));
        let e = error(&slurm);
        assert!(e.contains("EP_RENDEZVOUS") && e.contains("MASTER_ADDR"), "{e}");
    }

    #[test]
    fn errors_name_what_was_looked_for() {
        let e = error(&[AT]);
        for name in ["EP_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"] {
            assert!(e.contains(name), "{e}");
        }
    }

    #[test]
    fn malformed_values_are_errors() {
        let world = ("EP_WORLD", "2");
        for rank in ["-1", "one", "1.0", "4294967296"] {
            let e = error(&[AT, ("EP_RANK", rank), world]);
            assert!(e.contains("EP_RANK"), "{e}");
        }
        assert!(
            error(&[AT, ("EP_RANK", "2"), world]).contains("EP_RANK=2 is not below EP_WORLD=2")
        );
        for world in ["65537", "5000000", "4294967295"] {
            let e = from(&[AT, ("EP_RANK", "0"), ("EP_WORLD", world)]).unwrap_err();
            assert_eq!(e.kind(), crate::ErrorKind::Argument);
            assert!(e.to_string().contains(&format!("EP_WORLD={world} is more than")), "{e}");
        }
        assert!(from(&[AT, ("EP_RANK", "0"), ("EP_WORLD", "65536")]).is_ok());
        let e = Rendezvous::new(0, usize::MAX, "node0:1").unwrap_err().to_string();
        assert!(e.contains(&format!("world size {} is more than", usize::MAX)), "{e}");
        for address in ["node0", "node0:", ":1", "node0:0", "node0:65536", "::1:5", "a b:1"] {
            let e = error(&[("EP_RENDEZVOUS", address), ("EP_RANK", "0"), world]);
            assert!(e.contains("EP_RENDEZVOUS"), "{e}");
        }
        for port in ["65535", "0", "x"] {
            let master = [("MASTER_ADDR", "n"), ("MASTER_PORT", port)];
            let e = error(&[master[0], master[1], ("EP_RANK", "0"), world]);
            assert!(e.contains("MASTER_PORT"), "{e}");
        }
        for seconds in ["0", "-1", "soon", "inf"] {
            let e = error(&[AT, ("EP_RANK", "0"), world, ("EP_TIMEOUT", seconds)]);
            assert!(e.contains("EP_TIMEOUT"), "{e}");
        }
    }

    #[test]
    fn v6_addresses_need_brackets() {
        let r = Rendezvous::new(0, 1, "[::1]:29500").unwrap();
        assert_eq!((r.host.as_str(), r.address().as_str()), ("::1", "[::1]:29500"));
        assert!(Rendezvous::new(0, 1, "::1:29500").is_err());
    }
}
