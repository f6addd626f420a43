"""Load for LLM servers: traces, open-loop replay with honest timing, SLO reports.

    trace   what is sent and when, made before anything is sent
    run     workers that send it and write down what came back
    target  how to talk to a server: TKNP gRPC, OpenAI HTTP
    measure what the records mean: metrics, SLO attainment, validity
    report  figures, one HTML page, PNG, CSV
    echo    a server with known timing, to check all of the above against

Nothing here knows more of a TKNP pool than its public protos.
"""
