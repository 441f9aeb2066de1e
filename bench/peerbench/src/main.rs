//! peerbench: `engine` (a fake engine) and `load` (a load generator) in one binary without dependencies.
//! bench/run.py builds it: rustc -O --edition 2021 -o OUT src/main.rs

mod engine;
mod json;
mod load;
mod sys;

const HELP: &str = "peerbench engine port=P [model=sim ttft_ms=0 itl_ms=0 tokens=32 cache_blocks=0 prefill_us=0 serial=1 max_running=0]
  the same keys can be changed later:  GET /sim/config?ttft_ms=50&itl_ms=20 ; also GET /sim/stats, GET /sim/reset

peerbench load target=127.0.0.1:P[,127.0.0.1:Q...] [path=/v1/chat/completions model=sim stream=0 conc=1
  requests=N secs=S max_secs=60 rate=R tokens=32 prompt_bytes=400 ramp_ms=0 abort_events=K abort_ms=T
  sessions=N turns=6 groups=10 system_bytes=2048 user_bytes=600 sticky=0 seed=1 usage=0 show=0 header='k: v' ...]
  only loopback targets are accepted; every run ends by itself (max_secs)";

fn die(s: &str) -> ! {
    eprintln!("{s}\n\n{HELP}");
    std::process::exit(2)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let kv = |a: &String| -> (String, String) {
        match a.split_once('=') {
            Some((k, v)) => (k.to_string(), v.to_string()),
            None => die(&format!("not key=value: {a}")),
        }
    };
    match args.first().map(|s| s.as_str()) {
        Some("engine") => {
            let mut c = engine::Config::default();
            for a in &args[1..] {
                let (k, v) = kv(a);
                if !c.set(&k, &v) {
                    die(&format!("bad setting {a}"));
                }
            }
            engine::Engine::new(c).run()
        }
        Some("load") => {
            let mut o = load::Options::default();
            for a in &args[1..] {
                let (k, v) = kv(a);
                let f = || -> f64 { v.parse().unwrap_or_else(|_| die(&format!("not a number: {a}"))) };
                match k.as_str() {
                    "target" => {
                        for t in v.split(',') {
                            let sa: std::net::SocketAddrV4 =
                                t.parse().unwrap_or_else(|_| die(&format!("bad target {t}")));
                            if !sa.ip().is_loopback() {
                                die("only loopback targets");
                            }
                            o.targets.push((sa.ip().octets(), sa.port()));
                        }
                    }
                    "path" => o.path = v.clone(),
                    "model" => o.model = v.clone(),
                    "header" => o.headers.push(v.clone()),
                    "stream" => o.stream = f() != 0.0,
                    "conc" => o.conc = f() as usize,
                    "requests" => o.requests = f() as u64,
                    "secs" => o.duration_us = (f() * 1e6) as u64,
                    "max_secs" => o.max_us = (f() * 1e6) as u64,
                    "rate" => o.rate = f(),
                    "tokens" => o.tokens = f() as u32,
                    "prompt_bytes" => o.prompt_bytes = f() as usize,
                    "ramp_ms" => o.ramp_us = (f() * 1e3) as u64,
                    "abort_events" => o.abort_events = f() as u32,
                    "abort_ms" => o.abort_us = (f() * 1e3) as u64,
                    "sessions" => o.sessions = f() as usize,
                    "turns" => o.turns = f() as usize,
                    "groups" => o.groups = f() as usize,
                    "system_bytes" => o.system_bytes = f() as usize,
                    "user_bytes" => o.user_bytes = f() as usize,
                    "sticky" => o.sticky = f() != 0.0,
                    "seed" => o.seed = f() as u64,
                    "usage" => o.usage = f() != 0.0,
                    "show" => o.show = f() != 0.0,
                    _ => die(&format!("unknown setting {a}")),
                }
            }
            if o.targets.is_empty() {
                die("no target");
            }
            if o.requests == 0 && o.duration_us == 0 && o.sessions == 0 {
                die("give requests=, secs= or sessions=");
            }
            load::Load::new(o).run()
        }
        _ => die("engine or load?"),
    }
}
