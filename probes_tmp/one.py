import sys; sys.argv=["x","--gpt2"]
exec(open("probes_tmp/dry.py").read().split("cases = [")[0])
import cProfile, pstats
for c in ((1,128,1),):
    go(*c, reps=300)
    pr = cProfile.Profile(); pr.enable(); go(*c, reps=1000); pr.disable()
    st = pstats.Stats(pr); st.sort_stats("cumtime").print_stats(45)
